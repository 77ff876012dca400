"""How HTTP reaches the routers: through HAProxy, which Serve runs, straight into each router.

Serve's own proxy passes every streamed token on as an item of its own and takes more of a core than
all of the router. The mode is switched on by environment variables, which Ray and Serve read when
they are imported, on every node: this module must not import them.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from deploy.serving.cluster_tls import tls_environment
from deploy.serving.haproxy.front_door import FrontDoor
from deploy.serving.haproxy.ports import free_ports

# On a cluster, where each node has one HAProxy: of its statistics and metrics, on loopback, and of
# Serve's own proxy, which takes the requests while Serve builds a changed application.
PORTS = (8404, 9101, 8500)
MAX_SOCKET_PATH = 97  # HAProxy's; Serve puts a folder named by the node, of 56 letters, into it
MAX_DIRECTORY = MAX_SOCKET_PATH - len("/metrics.sock") - 57
# The head takes a node for lost after 12 s without an answer, not after a minute: streams wait.
NODE_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
MIDDLEWARES = "deploy.serving.router.middleware:middlewares"  # what Serve puts around all HTTP
MANAGER = "deploy.serving.haproxy.manager:install"  # what Serve's controller calls when it starts

_SCRIPT_HEAD = """#!/bin/sh
# Ray ends the process group of a worker that dies: HAProxy goes on without its manager.
"""
_SCRIPT = (
    _SCRIPT_HEAD
    + """[ -x "$(command -v setsid)" ] && exec setsid {haproxy} "$@"
exec {haproxy} "$@"
"""
)


def cluster_environment(
    directory: Path, haproxy: str, door: FrontDoor, tls: Path | None = None
) -> dict[str, str]:
    """Return what every node of a cluster must have in its environment before `ray start`.

    Args:
        directory: for HAProxy's files on each node; is made if it is not there.
        haproxy: the program.
        door: what an operator says of where clients come in.
        tls: with this node's certificate, if hosts are to trust nothing else.

    Raises:
        ValueError: if the directory's path is too long for that of a socket, or other hosts would
            not take the certificate.
        OSError: if a file cannot be read or written.
    """
    if len(str(directory)) > MAX_DIRECTORY:
        raise ValueError(
            f"directory: {directory} is too long for the path of a socket: at most "
            f"{MAX_DIRECTORY} letters"
        )
    return (
        ray_environment()
        | NODE_CHECKS
        | _haproxy_settings(directory, _write_script(directory, haproxy), PORTS)
        | door.environment()
        | ({} if tls is None else tls_environment(tls))
    )


def server_environment(
    directory: Path, haproxy: str, ports: Sequence[int], door: FrontDoor
) -> dict[str, str]:
    """Return the environment in which Serve runs HAProxy for one server of its own.

    Args:
        directory: for its files; must last as long as the server.
        haproxy: the program.
        ports: that no other server takes; the first half is HAProxy's, the other the routers'.
        door: what an operator says of where clients come in.
    """
    of_haproxy, of_routers = ports[: len(ports) // 2], ports[len(ports) // 2 :]
    own = free_ports(len(PORTS), of_haproxy)
    settings = _haproxy_settings(directory, _write_script(directory, haproxy), own)
    return (
        settings
        | {
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(of_routers[0]),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(of_routers[-1]),
        }
        | door.environment()
    )


def ray_environment() -> dict[str, str]:
    """Return what Ray must find in every process of it."""
    return {
        # Its ports are open to the network: it asks for a token.
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ranks would be niced, and whoever else runs for a millisecond would halt them all.
        "RAY_worker_niceness": "0",
    }


def local_ray_environment() -> dict[str, str]:
    """Return what switches off what a cluster of one server, without a dashboard, has no use for.

    The cores are the ranks': together this takes 2% of one from them.
    """
    return {
        "RAY_enable_metrics_collection": "0",  # our own are the routers'
        "RAY_task_events_report_interval_ms": "0",
        "REPORTER_UPDATE_INTERVAL_MS": "600000",  # of how busy each process is
        # Look for new log files twice a second, not each time that their ends are read.
        "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    }


def _haproxy_settings(directory: Path, script: Path, ports: Sequence[int]) -> dict[str, str]:
    statistics, metrics, fallback = ports
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # What RAY_SERVE_THROUGHPUT_OPTIMIZED stands for, without the list of it that Serve's
        # controller would print on the server's terminal.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_PROXY_USE_GRPC": "0",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(script),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        # How long a router that ends still takes requests: until HAProxy has heard of it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES,
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": MANAGER,
        # Seconds between two looks whether a manager of HAProxy lives; three make a new one.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # on a busy machine a start takes long
        # Seconds until a caller inside of Serve that hears nothing from a replica says so on the
        # terminal and asks again, and the most of them: a busy machine takes longer than 0.1 s.
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "8",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # the cores are the ranks'
        # Seconds between two looks of Serve's controller at everything: ten a second take 3% of a
        # core from the ranks, and from what starts.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
        # Milliseconds between two times that each replica tells Ray of the requests it had; Ray
        # looks at these numbers every ten seconds.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
        # How often schedulers tell the autoscaler of their load; ten seconds would be late.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    }


def _write_script(directory: Path, haproxy: str) -> Path:
    """Write the program that starts HAProxy; no other user may change it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    script = directory / "haproxy"
    script.write_text(_SCRIPT.format(haproxy=shlex.quote(_wrapped_program(haproxy))))
    script.chmod(0o700)
    return script


def _wrapped_program(program: str) -> str:
    """Return what `program` starts if it is such a script, else itself.

    Where the environment is set already, it names such a script as the HAProxy to start.
    """
    path = Path(program)
    if not path.is_file() or not path.read_bytes().startswith(_SCRIPT_HEAD.encode()):
        return program
    _, started, _ = shlex.split(path.read_text().splitlines()[-1])
    return started
