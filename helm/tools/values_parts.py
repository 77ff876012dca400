"""The parts of the chart's values that others are made of: groups of pods, volumes, probes.

Owns their names, types, defaults and meaning.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

AccessMode = Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]
Object = dict[str, Any]  # passed through as it stands; the API server checks it


class Part(BaseModel):
    """A block of values: unknown keys are refused by name."""

    model_config = ConfigDict(extra="forbid")


class ImageValues(Part):
    """Where the images are; deploy/images makes them in three flavours."""

    registry: Annotated[
        str, Field(description="Put before every image of the chart; for a private registry.")
    ] = ""
    repository: Annotated[str, Field(min_length=1, description="Repository of the images.")] = (
        "topwork"
    )
    tag: Annotated[
        str,
        Field(description="Tag, to which -router, -cpu or -cuda is added; default: appVersion."),
    ] = ""
    digests: Annotated[
        dict[
            Literal["router", "cpu", "cuda"],
            Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")],
        ],
        Field(
            description="Digest by flavour (router, cpu, cuda), which then decides, not the tag."
        ),
    ] = Field(default_factory=dict)
    pullPolicy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], Field(description="When images are pulled.")
    ] = "IfNotPresent"
    pullSecrets: Annotated[
        list[str], Field(description="Names of secrets with registry credentials.")
    ] = Field(default_factory=list)


class SecretKey(Part):
    """One key of a secret that exists; the chart never holds a secret itself."""

    secretName: Annotated[str, Field(description="Name of an existing Secret.")] = ""
    key: Annotated[str, Field(min_length=1, description="Key in it.")] = "value"


class ConfigMapKey(Part):
    """One key of a ConfigMap that exists."""

    configMapName: Annotated[str, Field(description="Name of an existing ConfigMap.")] = ""
    key: Annotated[str, Field(min_length=1, description="Key in it.")] = "rules.yaml"


class PvcValues(Part):
    """A claim, existing or made by the chart."""

    existingClaim: Annotated[
        str, Field(description="Name of an existing claim; default: the chart makes one.")
    ] = ""
    size: Annotated[str, Field(description="Size of the claim that the chart makes.")] = "50Gi"
    storageClass: Annotated[str, Field(description="Its class; default: the cluster's.")] = ""
    accessModes: Annotated[
        list[AccessMode], Field(description="Its access modes; pods on several nodes share it.")
    ] = Field(default_factory=lambda: list[AccessMode](["ReadWriteMany"]))
    keep: Annotated[bool, Field(description="Keep it when the release is uninstalled.")] = True


class ObjectStoreValues(Part):
    """A download from an object store by rclone, before a pod starts."""

    source: Annotated[
        str, Field(description="What to copy, as rclone writes it: REMOTE:BUCKET/PATH.")
    ] = ""
    credentialsSecret: Annotated[
        str,
        Field(
            description="Secret of RCLONE_CONFIG_REMOTE_TYPE and the like, rclone's environment."
        ),
    ] = ""
    image: Annotated[
        str,
        Field(min_length=1, description="Image whose program is rclone; any version from 1.60."),
    ] = "rclone/rclone:1.69.1"
    sizeLimit: Annotated[str, Field(description="Limit of the volume that it fills.")] = "50Gi"


class ImageVolumeValues(Part):
    """An OCI artifact mounted as a volume (Kubernetes 1.33, feature ImageVolume)."""

    reference: Annotated[str, Field(description="The artifact, best by digest.")] = ""
    pullPolicy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], Field(description="When it is pulled.")
    ] = "IfNotPresent"


class SourceValues(Part):
    """Where files come from; only the block that `source` names is read."""

    mountPath: Annotated[str, Field(pattern="^/.+", description="Where pods see them.")]
    pvc: Annotated[PvcValues, Field(description="A persistent volume claim.")] = PvcValues()
    hostPath: Annotated[
        str, Field(description="Directory of every node; Pod Security `restricted` forbids it.")
    ] = ""
    objectStore: Annotated[ObjectStoreValues, Field(description="An object store.")] = (
        ObjectStoreValues()
    )
    image: Annotated[ImageVolumeValues, Field(description="An image volume.")] = ImageVolumeValues()


class KernelCacheValues(Part):
    """Where pods on GPUs keep the kernels that they compile; only the block of `source` is read."""

    source: Annotated[
        Literal["none", "pvc", "hostPath"],
        Field(description="What new pods find them on; none: each compiles, some 20 seconds."),
    ] = "none"
    pvc: Annotated[PvcValues, Field(description="A persistent volume claim.")] = PvcValues(
        size="5Gi", keep=False
    )
    hostPath: Annotated[
        str,
        Field(
            description="Directory of every node that the pods' user may write; Pod Security "
            "`restricted` forbids it."
        ),
    ] = ""


class ProbeValues(Part):
    """How patient the probes are, in seconds."""

    startSeconds: Annotated[int, Field(ge=10, description="Until Ray on a node must answer.")] = 300
    unreadySeconds: Annotated[
        int, Field(ge=1, description="Without an answer until a pod gets no more requests.")
    ] = 10
    unhealthySeconds: Annotated[
        int,
        Field(
            ge=60,
            description="Without progress of the ranks (/health) or of Serve until the pod is "
            "restarted; more than loading the model takes.",
        ),
    ] = 900


class GroupValues(Part):
    """One kind of pods."""

    resources: Annotated[Object, Field(description="Requests and limits of the Ray container.")]
    nodeSelector: Annotated[dict[str, str], Field(description="Labels of the nodes.")] = Field(
        default_factory=dict
    )
    tolerations: Annotated[list[Object], Field(description="Taints that are tolerated.")] = Field(
        default_factory=list
    )
    affinity: Annotated[Object, Field(description="Affinity of the pods.")] = Field(
        default_factory=dict
    )
    topologySpread: Annotated[
        list[Object],
        Field(description="Topology spread constraints; the pods' own labels are filled in."),
    ] = Field(default_factory=list)
    priorityClassName: Annotated[str, Field(description="Priority class.")] = ""
    runtimeClassName: Annotated[str, Field(description="Runtime class, such as nvidia.")] = ""
    podLabels: Annotated[dict[str, str], Field(description="More labels of the pods.")] = Field(
        default_factory=dict
    )
    podAnnotations: Annotated[
        dict[str, str], Field(description="More annotations of the pods.")
    ] = Field(default_factory=dict)
    rayStartParams: Annotated[
        dict[str, str], Field(description="More parameters of `ray start`.")
    ] = Field(default_factory=dict)
    sharedMemory: Annotated[
        str, Field(description="/dev/shm: Ray's objects, adapters in host memory, CPU ranks' sums.")
    ] = "2Gi"
    disruptionBudget: Annotated[
        bool,
        Field(
            description="All but one router, scheduler or server must stay when nodes are drained; "
            "of the head: it must stay, and a drain waits for whoever deletes its pod."
        ),
    ] = True
