"""How many processes there are, and what happens when one goes."""

from typing import Annotated

from pydantic import Field, model_validator

from deploy.keys.base import Keys


class ClusterKeys(Keys):
    """Keys that `--help` shows under Cluster."""

    ray_address: Annotated[
        str | None, Field(description="Ray cluster to join; default: start one on this machine.")
    ] = None
    replicas: Annotated[
        int, Field(ge=1, description="Schedulers, each with its own ranks; at least so many.")
    ] = 1
    max_replicas: Annotated[
        int | None,
        Field(ge=1, description="Schedulers at most, as load asks; default: always `replicas`."),
    ] = None
    scale_up_delay: Annotated[
        float, Field(ge=0, description="Seconds of too much load before a scheduler is added.")
    ] = 10.0
    scale_down_delay: Annotated[
        float, Field(ge=0, description="Seconds of little load before a scheduler is taken away.")
    ] = 120.0
    routers: Annotated[
        int | None,
        Field(ge=1, description="Router replicas; default: two where cores allow, else one."),
    ] = None
    drain_timeout: Annotated[
        float,
        Field(gt=0, description="Seconds that what runs may take when a replica has to go."),
    ] = 30.0
    recovery_timeout: Annotated[
        float, Field(gt=0, description="Seconds that streams wait for lost processes to come back.")
    ] = 120.0
    surge: Annotated[
        bool,
        Field(
            description="New ranks start before the old ones end when an update needs new ones: "
            "nothing is refused meanwhile, but the cluster must have room for both."
        ),
    ] = False
    trust_rank_network: Annotated[
        bool,
        Field(
            description="With TLS between hosts, let one scheduler's ranks be GPUs of several: "
            "NCCL sends in clear, so what is below must encrypt (WireGuard, IPsec)."
        ),
    ] = False

    @model_validator(mode="after")
    def _check_replicas(self) -> "ClusterKeys":
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is less than replicas {self.replicas}"
            )
        return self
