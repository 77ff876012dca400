"""The chart's values: names, types, defaults and meaning of each, from which three files are made.

values.yaml, values.schema.json and the tables of helm/README.md come from here; `topwork:` comes
from ServeConfig.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from helm.tools.values_features import (
    AutoscalingValues,
    IngressValues,
    MonitoringValues,
    NetworkPolicyValues,
    RayValues,
    RouteValues,
    TestValues,
)
from helm.tools.values_parts import (
    ConfigMapKey,
    GroupValues,
    ImageValues,
    KernelCacheValues,
    Object,
    Part,
    ProbeValues,
    SecretKey,
    SourceValues,
)


def _resources(cpu: str, memory: str) -> Object:
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}}


class ModelValues(SourceValues):
    """The base model."""

    mountPath: Annotated[str, Field(pattern="^/.+", description="Where pods see it.")] = "/models"
    source: Annotated[
        Literal["pvc", "hostPath", "objectStore", "image", "hub"],
        Field(description="Where the model comes from; hub: every pod downloads `hubId`."),
    ] = "pvc"
    path: Annotated[
        str, Field(pattern="^[^/].*|^$", description="The model's directory, below mountPath.")
    ] = ""
    hubId: Annotated[str, Field(description="Hub id of the model, with source hub.")] = ""
    hubToken: Annotated[SecretKey, Field(description="Hub token, if the model asks for one.")] = (
        SecretKey(key="token")
    )


class AdapterValues(SourceValues):
    """The adapters."""

    mountPath: Annotated[str, Field(pattern="^/.+", description="Where pods see them.")] = (
        "/adapters"
    )
    source: Annotated[
        Literal["none", "pvc", "hostPath", "objectStore", "image"],
        Field(description="Where adapters come from; none: they lie beside the model, or nowhere."),
    ] = "none"
    served: Annotated[
        dict[str, str],
        Field(
            description="Adapters to load: directory by name, below mountPath unless absolute. "
            "A change is an update of the Serve config in place."
        ),
    ] = Field(default_factory=dict)
    configMap: Annotated[
        str,
        Field(
            description="ConfigMap of more of them, directory by name, that others keep; read at "
            "each install and upgrade."
        ),
    ] = ""
    watch: Annotated[
        bool,
        Field(description="Every directory below mountPath is an adapter; changes are noticed."),
    ] = False


class ServiceValues(Part):
    """The service that clients ask."""

    type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], Field(description="Its type.")
    ] = "ClusterIP"
    port: Annotated[int, Field(ge=1024, le=65535, description="Its port, and the server's.")] = 8000
    annotations: Annotated[dict[str, str], Field(description="Its annotations.")] = Field(
        default_factory=dict
    )


class SchedulerValues(GroupValues):
    """Pods of schedulers and their ranks."""

    resources: Annotated[
        Object, Field(description="Requests and limits of the Ray container, without GPUs.")
    ] = _resources("4", "16Gi")
    ranksPerHost: Annotated[
        int,
        Field(ge=0, description="Ranks in one pod; 0: all of a scheduler. Fewer: it has several."),
    ] = 0
    gpuResource: Annotated[
        str, Field(min_length=1, description="Resource of one GPU; each rank gets one on cuda.")
    ] = "nvidia.com/gpu"


class Values(Part):
    """All values of the chart."""

    nameOverride: Annotated[str, Field(description="In place of the chart's name.")] = ""
    fullnameOverride: Annotated[str, Field(description="In place of RELEASE-NAME.")] = ""
    mode: Annotated[
        Literal["rayservice", "deployment"],
        Field(description="RayService on KubeRay, or one-node servers that need no operator."),
    ] = "rayservice"
    commonLabels: Annotated[dict[str, str], Field(description="Labels of every object.")] = Field(
        default_factory=dict
    )
    image: Annotated[ImageValues, Field(description="The images.")] = ImageValues()
    topwork: Annotated[
        dict[str, Any],
        Field(description="Keys of `topwork serve`, such as tp or kv_cache_memory; see below."),
    ] = Field(default_factory=lambda: {"device": "cpu", "tp": 1})
    apiKeys: Annotated[
        SecretKey,
        Field(
            description="The file of API keys; without it, or topwork.oidc_issuer, none is served."
        ),
    ] = SecretKey(key="keys.yaml")
    tokenRules: Annotated[
        ConfigMapKey, Field(description="Rules for tokens of topwork.oidc_issuer.")
    ] = ConfigMapKey()
    model: Annotated[ModelValues, Field(description="The base model.")] = ModelValues()
    adapters: Annotated[AdapterValues, Field(description="The adapters.")] = AdapterValues()
    kernelCache: Annotated[
        KernelCacheValues, Field(description="What GPU kernels are compiled to.")
    ] = KernelCacheValues()
    service: Annotated[ServiceValues, Field(description="The service.")] = ServiceValues()
    head: Annotated[GroupValues, Field(description="The head: no model, no requests.")] = (
        GroupValues(resources=_resources("1", "4Gi"), disruptionBudget=False)
    )
    router: Annotated[
        GroupValues, Field(description="Routers: one in each pod, as many as topwork.routers.")
    ] = GroupValues(resources=_resources("1", "3Gi"))
    scheduler: Annotated[
        SchedulerValues, Field(description="Schedulers and ranks; in deployment mode, the server.")
    ] = SchedulerValues()
    ray: Annotated[RayValues, Field(description="The Ray cluster.")] = RayValues()
    autoscaling: Annotated[
        AutoscalingValues, Field(description="Number of servers in deployment mode.")
    ] = AutoscalingValues()
    probes: Annotated[ProbeValues, Field(description="The probes.")] = ProbeValues()
    terminationGracePeriodSeconds: Annotated[
        int,
        Field(
            ge=30,
            description="Time that a pod has to end. With rayservice, what it runs is started on "
            "another one first: give it as long as a model takes to load, and the drain.",
        ),
    ] = 300
    podSecurityContext: Annotated[Object, Field(description="Security of the pods.")] = Field(
        default_factory=lambda: {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    )
    securityContext: Annotated[Object, Field(description="Security of every container.")] = Field(
        default_factory=lambda: {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }
    )
    serviceAccount: Annotated[
        str, Field(description="Service account of the pods; default: one without any right.")
    ] = ""
    extraEnv: Annotated[list[Object], Field(description="More environment of the servers.")] = (
        Field(default_factory=list)
    )
    extraVolumes: Annotated[list[Object], Field(description="More volumes of the pods.")] = Field(
        default_factory=list
    )
    extraVolumeMounts: Annotated[list[Object], Field(description="And where they are.")] = Field(
        default_factory=list
    )
    networkPolicy: Annotated[NetworkPolicyValues, Field(description="Who may talk to whom.")] = (
        NetworkPolicyValues()
    )
    ingress: Annotated[IngressValues, Field(description="An Ingress.")] = IngressValues()
    httpRoute: Annotated[RouteValues, Field(description="A route of the Gateway API.")] = (
        RouteValues()
    )
    monitoring: Annotated[MonitoringValues, Field(description="Prometheus and Grafana.")] = (
        MonitoringValues()
    )
    tests: Annotated[TestValues, Field(description="`helm test`.")] = TestValues()
    extraObjects: Annotated[
        list[Object], Field(description="More objects, whose strings are templates.")
    ] = Field(default_factory=list)
