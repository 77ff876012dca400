"""The parts of the chart's values that turn features on: Ray, scaling, network, watching.

Owns their names, types, defaults and meaning.
"""

from typing import Annotated, Literal

from pydantic import Field

from helm.tools.values_parts import Object, Part, SecretKey


class RedisValues(Part):
    """A Redis that exists."""

    address: Annotated[str, Field(description="HOST:PORT, or redis:// and rediss:// URLs.")] = ""
    password: Annotated[SecretKey, Field(description="Its password, if there is one.")] = SecretKey(
        key="password"
    )


class RocksdbValues(Part):
    """A volume of the head."""

    size: Annotated[str, Field(description="Size of its claim.")] = "1Gi"
    storageClass: Annotated[str, Field(description="Its class; default: the cluster's.")] = ""


class FaultToleranceValues(Part):
    """Whether the cluster outlives its head."""

    backend: Annotated[
        Literal["off", "redis", "rocksdb"],
        Field(
            description="Where the head's state is kept; rocksdb needs KubeRay 1.7 with its gate "
            "GCSFaultToleranceEmbeddedStorage."
        ),
    ] = "off"
    redis: Annotated[RedisValues, Field(description="With backend redis.")] = RedisValues()
    rocksdb: Annotated[RocksdbValues, Field(description="With backend rocksdb.")] = RocksdbValues()


class UpgradeValues(Part):
    """What happens when the cluster, not only the Serve config, changes."""

    type: Annotated[
        Literal["None", "NewCluster", "NewClusterWithIncrementalUpgrade"],
        Field(
            description="None: nothing until the service is made anew; NewCluster: a second "
            "cluster beside the first, with as many GPUs; Incremental: in steps, with a Gateway."
        ),
    ] = "NewCluster"
    gatewayClassName: Annotated[str, Field(description="With Incremental: class.")] = ""
    maxSurgePercent: Annotated[
        int, Field(ge=0, le=100, description="With Incremental: more capacity at most.")
    ] = 50
    stepSizePercent: Annotated[
        int, Field(ge=1, le=100, description="With Incremental: requests moved in one step.")
    ] = 10
    intervalSeconds: Annotated[
        int, Field(ge=1, description="With Incremental: time between two steps.")
    ] = 30


class RayAutoscalerValues(Part):
    """Ray's autoscaler, which makes scheduler pods up to topwork.max_replicas."""

    enabled: Annotated[bool, Field(description="Run it beside the head.")] = False
    idleTimeoutSeconds: Annotated[
        int, Field(ge=1, description="A pod without work ends after this.")
    ] = 300
    resources: Annotated[Object, Field(description="Requests and limits of its container.")] = (
        Field(
            default_factory=lambda: {
                "requests": {"cpu": "200m", "memory": "512Mi"},
                "limits": {"memory": "512Mi"},
            }
        )
    )


class RayValues(Part):
    """The Ray cluster."""

    version: Annotated[
        str, Field(pattern=r"^\d+\.\d+\.\d+$", description="Ray's version in the images.")
    ] = "2.60.0"
    authSecret: Annotated[
        str,
        Field(
            description="Secret whose key auth_token is Ray's token (KubeRay 1.6); default: the "
            "operator makes one."
        ),
    ] = ""
    tlsSecret: Annotated[
        str,
        Field(
            description="Secret with ca.pem and ca.key, as `topwork certificates` makes them: each "
            "pod makes itself a certificate, and what passes between pods is encrypted."
        ),
    ] = ""
    faultTolerance: Annotated[FaultToleranceValues, Field(description="Of the head.")] = (
        FaultToleranceValues()
    )
    upgrade: Annotated[UpgradeValues, Field(description="Of the cluster.")] = UpgradeValues()
    autoscaler: Annotated[RayAutoscalerValues, Field(description="Of scheduler pods.")] = (
        RayAutoscalerValues()
    )


class HpaValues(Part):
    """A HorizontalPodAutoscaler."""

    enabled: Annotated[bool, Field(description="Make one.")] = False
    cpuUtilization: Annotated[
        int, Field(ge=0, le=100, description="Percent of the request to aim at; 0: not by CPU.")
    ] = 80
    metrics: Annotated[
        list[Object], Field(description="More metrics, such as topwork's by an adapter.")
    ] = Field(default_factory=list)


class KedaValues(Part):
    """A ScaledObject of KEDA, which asks Prometheus for the length of the queue."""

    enabled: Annotated[bool, Field(description="Make one.")] = False
    serverAddress: Annotated[str, Field(description="URL of Prometheus.")] = ""
    query: Annotated[
        str, Field(description="What to ask; default: requests waiting in this release.")
    ] = ""
    threshold: Annotated[
        int, Field(ge=1, description="Waiting requests for each server to aim at.")
    ] = 8


class AutoscalingValues(Part):
    """Number of servers in deployment mode."""

    minReplicas: Annotated[int, Field(ge=1, description="At least, and without scaling.")] = 1
    maxReplicas: Annotated[int, Field(ge=1, description="At most.")] = 4
    hpa: Annotated[HpaValues, Field(description="By Kubernetes.")] = HpaValues()
    keda: Annotated[KedaValues, Field(description="By KEDA.")] = KedaValues()


class NetworkPolicyValues(Part):
    """What the network lets through: pods of one release talk freely, others by these values."""

    enabled: Annotated[bool, Field(description="Make one for each kind of pods.")] = True
    clients: Annotated[
        list[Object], Field(description="Peers that may ask the API; none: everyone.")
    ] = Field(default_factory=list)
    operator: Annotated[list[Object], Field(description="Peers that are KubeRay's operator.")] = (
        Field(
            default_factory=lambda: [
                {
                    "namespaceSelector": {},
                    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
                }
            ]
        )
    )
    monitoring: Annotated[list[Object], Field(description="Peers that may read metrics.")] = Field(
        default_factory=lambda: [
            {
                "namespaceSelector": {},
                "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
            }
        ]
    )
    egress: Annotated[
        list[Object],
        Field(description="More egress rules, for a Redis or an object store by its address."),
    ] = Field(default_factory=list)
    webEgress: Annotated[
        bool, Field(description="Let pods reach ports 443 and 6443 anywhere: hub, stores, API.")
    ] = True


class IngressTls(Part):
    """One certificate."""

    hosts: Annotated[list[str], Field(description="Its hosts.")] = Field(default_factory=list)
    secretName: Annotated[str, Field(description="Its secret.")] = ""


class IngressValues(Part):
    """An Ingress to the service."""

    enabled: Annotated[bool, Field(description="Make one.")] = False
    className: Annotated[str, Field(description="Its class.")] = ""
    annotations: Annotated[dict[str, str], Field(description="Its annotations.")] = Field(
        default_factory=dict
    )
    hosts: Annotated[list[str], Field(description="Host names.")] = Field(default_factory=list)
    tls: Annotated[list[IngressTls], Field(description="Certificates.")] = Field(
        default_factory=list
    )


class RouteValues(Part):
    """An HTTPRoute to the service."""

    enabled: Annotated[bool, Field(description="Make one.")] = False
    parentRefs: Annotated[list[Object], Field(description="Gateways.")] = Field(
        default_factory=list
    )
    hostnames: Annotated[list[str], Field(description="Host names.")] = Field(default_factory=list)
    annotations: Annotated[dict[str, str], Field(description="Its annotations.")] = Field(
        default_factory=dict
    )


class MonitorValues(Part):
    """Whether an object for the Prometheus operator is made."""

    enabled: Annotated[bool, Field(description="Make it.")] = False
    labels: Annotated[
        dict[str, str], Field(description="Labels by which Prometheus or Grafana finds it.")
    ] = Field(default_factory=dict)


class MonitoringValues(Part):
    """Prometheus and Grafana."""

    intervalSeconds: Annotated[int, Field(ge=1, description="Between two scrapes.")] = 15
    apiKey: Annotated[
        SecretKey,
        Field(
            description="A key with the scope metrics, for the ServiceMonitor where keys are on."
        ),
    ] = SecretKey(key="key")
    serviceMonitor: Annotated[
        MonitorValues, Field(description="topwork's metrics, complete from one scrape.")
    ] = MonitorValues()
    podMonitor: Annotated[MonitorValues, Field(description="Ray's metrics of every pod.")] = (
        MonitorValues()
    )
    rules: Annotated[MonitorValues, Field(description="A PrometheusRule of all alerts.")] = (
        MonitorValues()
    )
    dashboards: Annotated[MonitorValues, Field(description="A ConfigMap of each dashboard.")] = (
        MonitorValues(labels={"grafana_dashboard": "1"})
    )


class TestValues(Part):
    """`helm test`."""

    apiKey: Annotated[
        SecretKey, Field(description="A key with which the test also asks for a completion.")
    ] = SecretKey(key="key")
    timeoutSeconds: Annotated[
        int, Field(ge=1, description="How long it waits until requests are served.")
    ] = 300
