"""How HTTP reaches the routers: through HAProxy, which Serve runs, straight into each router.

Serve's own proxy passes every streamed token on as an item of its own and takes more of a core than
all of the router. Owns the settings of that mode, which Serve reads from the environment when it is
imported. Knows nothing of Ray.
"""

import shlex
import socket
from pathlib import Path

_START = """#!/bin/sh
# Serve's configuration opens two ports of statistics to the network: keep them on this machine.
for argument; do
    case "$argument" in
    *.cfg) sed -i -e '/^frontend prometheus/,/bind/ s/bind :/bind 127.0.0.1:/' \\
                  -e '/^listen stats/,/bind/ s/bind \\*:/bind 127.0.0.1:/' "$argument" ;;
    esac
done
exec {haproxy} "$@"
"""


def front_environment(directory: Path, haproxy: str) -> dict[str, str]:
    """Return the environment in which Serve runs HAProxy for one server of its own.

    Args:
        directory: for its files; must last as long as the server.
        haproxy: the program.
    """
    start = directory / "haproxy"
    start.write_text(_START.format(haproxy=shlex.quote(haproxy)))
    start.chmod(0o700)
    statistics, metrics = _free_ports()
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
        # How long a router that ends still takes requests: until HAProxy has heard of it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # the cores are the ranks'
    }


def _free_ports() -> tuple[int, int]:
    """Return two ports of this machine that nobody has."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        return one.getsockname()[1], two.getsockname()[1]
