"""The one application that `topwork serve` and `serve deploy` run, whoever starts the cluster.

Binds the deployments to each other, and compares the configuration with Serve's own options: which
device there is, and who can reach the port. Reads neither model nor adapters: the node that builds
the application may have none of them.
"""

from pathlib import Path
from typing import Any

import ray
from ray.serve import Application
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from cluster.router.config import STANDARD_ERROR
from deploy.config import ConfigError, ServeConfig, load_config
from deploy.config_values import is_loopback
from deploy.engine_config import find_device
from deploy.memory.estimate import max_replicas_of
from deploy.models import commit_of
from deploy.serving.cluster_tls import check_rank_hosts
from deploy.serving.haproxy.front_door import KEYS as FRONT_DOOR_KEYS
from deploy.serving.haproxy.front_door import FrontDoor
from deploy.serving.pool.deployment import pool_deployment
from deploy.serving.redeploy_scope import (
    POOL_KEYS,
    ROUTER_KEYS,
    SCHEDULER_KEYS,
    with_own_version,
)
from deploy.serving.router.deployment import router_deployment
from deploy.serving.scheduler_deployment import scheduler_deployment

NAME = "topwork"


def build(args: dict[str, Any]) -> Application:
    """Return the application for the keys of ServeConfig: Serve's application builder.

    Raises:
        RayServeException: with nothing but the reason, which `serve status` shows.
    """
    try:
        config = load_config(None, args)
        _check_http_options(config, args)
        _check_front_door(config, args)
        resolved = _resolved(config)
        check_rank_hosts(resolved, _gpus_of_hosts())
        return application(resolved)
    except ConfigError as error:
        raise RayServeException(f"The application cannot be built: {error}") from None


def application(config: ServeConfig) -> Application:
    """Return the deployments, bound to each other; a changed key redeploys those that use it."""
    pool = with_own_version(pool_deployment(config), config, POOL_KEYS).bind(config)
    schedulers = with_own_version(scheduler_deployment(config), config, SCHEDULER_KEYS).bind(
        config, pool
    )
    router = with_own_version(router_deployment(config), config, ROUTER_KEYS)
    return router.bind(config, pool, schedulers)


def _resolved(config: ServeConfig) -> ServeConfig:
    """Return a configuration that means the same in every process: absolute paths, no "auto"."""
    model, device = Path(config.model).expanduser(), _device(config.device)
    return config.model_copy(
        update={
            "model": str(model.resolve()) if model.is_dir() else config.model,
            "revision": commit_of(config.model, config.revision),
            "served_model_name": config.base_name,
            "device": device,
            "routers": config.routers or num_routers(config, device, _resource("CPU")),
            "adapter": tuple(
                f"{name}={Path(path).absolute()}" for name, path in config.adapters().items()
            ),
            "adapter_dir": _absolute(config.adapter_dir),
            "adapter_root": _absolute(config.adapter_root),
            "tls_cert": config.tls_cert and config.tls_cert.absolute(),
            "tls_key": config.tls_key and config.tls_key.absolute(),
            "api_key_file": config.api_key_file and config.api_key_file.absolute(),
            "oidc_jwks": _absolute_file(config.oidc_jwks),
            "oidc_rules": config.oidc_rules and config.oidc_rules.absolute(),
            "adapter_state": config.adapter_state and config.adapter_state.absolute(),
            "adapter_staging": config.adapter_staging and config.adapter_staging.absolute(),
            "usage_file": config.usage_file and config.usage_file.absolute(),
            "request_log": _absolute_log(config.request_log),
            "record": config.record and config.record.absolute(),
        }
    )


def _absolute_log(target: str | None) -> str | None:
    return target if target in (None, STANDARD_ERROR) else str(Path(target).absolute())


def _absolute(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(Path(path).resolve()) for path in paths)


def _absolute_file(address: str | None) -> str | None:
    """Return an address that is no URL as a whole path."""
    return address if address is None or "://" in address else str(Path(address).absolute())


def _device(wanted: str) -> str:
    """Return where the ranks compute; "auto" takes GPUs where the cluster has any."""
    if wanted == "auto" and ray.is_initialized():
        return "cuda" if _resource("GPU") >= 1 else "cpu"
    return find_device(wanted) if wanted == "auto" else wanted


def num_routers(config: ServeConfig, device: str, num_cpus: float) -> int:
    """Return how many routers suit a cluster: two where all else leaves CPUs for two and two more.

    The two more are those that replace them when their configuration changes.
    """
    per_replica = 1 + (config.tp if device == "cpu" else 0)
    return 2 if num_cpus - per_replica * max_replicas_of(config) >= 4 else 1


def _resource(name: str) -> float:
    """Return how much of a resource the cluster has."""
    if not ray.is_initialized():
        return 0
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get(name, 0)


def _gpus_of_hosts() -> list[float]:
    """Return how many GPUs each host has that lives."""
    if not ray.is_initialized():
        return []
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"].get("GPU", 0.0) for node in nodes if node["Alive"]]


def _check_http_options(config: ServeConfig, args: dict[str, Any]) -> None:
    """Compare the configuration with where Serve listens, if it runs already.

    Raises:
        ConfigError: if it listens elsewhere than asked for, or to other machines without keys.
    """
    if not ray.is_initialized():  # to ask would start a cluster
        return
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    real, door = client.http_config, FrontDoor.of().host
    where = door or real.host
    for key, places in (("host", (real.host, door)), ("port", (real.port,))):
        if key in args and getattr(config, key) not in places:
            raise ConfigError(
                f"{key}: {getattr(config, key)} is asked for, but Serve listens on {where} "
                f"port {real.port}: set it in http_options of the Serve config, before Serve starts"
            )
    # Without a host Serve listens everywhere.
    is_open = not (real.host and is_loopback(real.host) and is_loopback(where))
    if is_open and not (config.anonymous or config.has_keys):
        raise ConfigError(
            f"Serve listens on {where}, which other machines can reach: give api_key_file, set "
            "http_options.host to 127.0.0.1, or set anonymous if something else decides who may ask"
        )


def _check_front_door(config: ServeConfig, args: dict[str, Any]) -> None:
    """Compare what is asked of HAProxy with what this node's environment tells it.

    Raises:
        ConfigError: if they differ: HAProxy would do something else than what was asked for.
    """
    asked, told = FrontDoor.of_config(config), FrontDoor.of()
    for key in FRONT_DOOR_KEYS:
        if key in args and getattr(asked, key) != getattr(told, key):
            raise ConfigError(
                f"{key}: HAProxy on the nodes is told of it before `ray start`: `topwork "
                f"environment --{key.replace('_', '-')}`; now it is {getattr(told, key)}"
            )
