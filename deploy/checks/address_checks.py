"""Binds the addresses that a server will bind on this machine, for a moment."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack

from cluster.engine.kv_event_publisher import offset_port
from deploy.config import ServeConfig
from deploy.config_errors import Mistake, one_line


def look_at_addresses(config: ServeConfig) -> Iterator[Mistake]:
    """Yield what cannot be bound, be it that two keys want the same port."""
    with ExitStack() as bound:
        for key, host, port in _addresses(config):
            server = bound.enter_context(socket.socket())
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((host, port))
                server.listen(1)
            except (OSError, OverflowError, ValueError) as error:
                yield _mistake(key, host, port, error)


def _addresses(config: ServeConfig) -> Iterator[tuple[str, str, int]]:
    """Yield (key, host, port) of each address."""
    yield "port", config.host, config.port
    if config.ray_address is not None:
        return  # schedulers are on nodes that Ray chooses
    for key in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        for number in range(config.replicas if getattr(config, key) else 0):
            endpoint = offset_port(getattr(config, key), number)
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            yield key, "0.0.0.0" if host == "*" else host, int(port)


def _mistake(key: str, host: str, port: int, error: Exception) -> Mistake:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return Mistake(f"{key}: {host}:{port} is taken; end what listens there, or take another")
    is_of_host = key == "port" and not isinstance(error, PermissionError | OverflowError)
    said = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
    return Mistake(f"{'host' if is_of_host else key}: cannot bind {host}:{port}: {said}")
