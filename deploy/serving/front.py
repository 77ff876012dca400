"""How HTTP reaches the routers: through HAProxy, which Serve runs, straight into each router.

Serve's own proxy passes every streamed token on as an item of its own and takes more of a core than
all of the router. Owns the environment of that mode, which Ray and Serve read when they are
imported, on every node. Knows nothing of Ray.
"""

import shlex
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

# On a cluster, where each node has one HAProxy: of its statistics and metrics, on loopback, and of
# Serve's own proxy, which takes the requests while Serve builds a changed application.
PORTS = (8404, 9101, 8500)
ROUTER_PORTS = 100  # from which the routers of a server of its own take theirs
MAX_PORT = 2**16 - 1
MAX_SOCKET_PATH = 97  # HAProxy's; Serve puts a folder named by the node, of 56 letters, into it
MAX_DIRECTORY = MAX_SOCKET_PATH - len("/admin.sock") - 57

_START = """#!/bin/sh
# Serve's configuration opens two ports of statistics to the network: keep them on this machine.
# {what}
for argument; do
    case "$argument" in
    *.cfg) sed -i -e '/^frontend prometheus/,/bind/ s/bind :/bind 127.0.0.1:/' \\
                  -e '/^listen stats/,/bind/ s/bind \\*:/bind 127.0.0.1:/'{more} "$argument" ;;
    esac
done
exec {haproxy} "$@"
"""


def cluster_environment(directory: Path, haproxy: str, host: str | None) -> dict[str, str]:
    """Return what every node of a cluster must have in its environment before `ray start`.

    Args:
        directory: for HAProxy's files on each node; is made if it is not there.
        haproxy: the program.
        host: the only address on which HAProxy listens, if it is not to be Serve's `host`.

    Raises:
        ValueError: if the directory's path is too long for that of a socket.
    """
    if len(str(directory)) > MAX_DIRECTORY:
        raise ValueError(
            f"directory: {directory} is too long for the path of a socket: at most "
            f"{MAX_DIRECTORY} letters"
        )
    return ray_environment() | _front(directory, _write_start(directory, haproxy, host), PORTS)


def front_environment(directory: Path, haproxy: str) -> dict[str, str]:
    """Return the environment in which Serve runs HAProxy for one server of its own.

    Args:
        directory: for its files; must last as long as the server.
        haproxy: the program.
    """
    *ports, ingress = _free_ports(4)
    first = min(ingress, MAX_PORT - ROUTER_PORTS)
    # Else all servers of a machine would give their routers the same ports, and the HAProxy of one
    # would find another's router where its own has ended.
    return _front(directory, _write_start(directory, haproxy, None), ports) | {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + ROUTER_PORTS),
    }


def ray_environment() -> dict[str, str]:
    """Return what Ray must find in every process of it."""
    return {
        # Its ports are open to the network: it asks for a token.
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ranks would be niced, and whoever else runs for a millisecond would halt them all.
        "RAY_worker_niceness": "0",
    }


def _front(directory: Path, start: Path, ports: Sequence[int]) -> dict[str, str]:
    statistics, metrics, fallback = ports
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(start),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        # How long a router that ends still takes requests: until HAProxy has heard of it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # the cores are the ranks'
        # How often schedulers tell the autoscaler of their load; ten seconds would be late.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    }


def _write_start(directory: Path, haproxy: str, host: str | None) -> Path:
    """Write the program that starts HAProxy; nobody else may change it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    what, more = "", ""
    if host is not None:
        what = "And listen to requests where it was asked for, and nowhere else."
        bind = f"s/bind [^ ]*:\\([0-9]*\\)/bind {host}:\\1/"
        more = f" \\\n                  -e '/^frontend http_frontend/,/bind/ {bind}'"
    start = directory / "haproxy"
    start.write_text(_START.format(haproxy=shlex.quote(haproxy), what=what, more=more))
    start.chmod(0o700)
    return start


def _free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody has."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]
