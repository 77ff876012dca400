"""Serve's manager of HAProxy, changed so that HAProxy is hardly ever away.

Serve looks at HAProxy and its manager every ten seconds, three times, and then starts both anew.
Here the manager starts HAProxy again the moment that it dies, with the configuration that it had;
HAProxy goes on without its manager, and the next one takes it over with all connections. A guard
ends it when the node's raylet is gone: nobody would take it over then.

Serve's controller calls `install` when it starts: `environment` beside this names it.
"""

import asyncio
import logging
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.serve._private import haproxy
from ray.serve._private.constants import SERVE_LOGGER_NAME

from deploy.serving.haproxy import guard
from deploy.serving.haproxy.certificate_watcher import CertificateWatcher
from deploy.serving.haproxy.configuration import Limits, configured
from deploy.serving.haproxy.front_door import FrontDoor
from deploy.serving.haproxy.router_tls import link_certificate, with_router_tls
from deploy.serving.process_setup import set_log_level
from worker.transport.tls import node_tls

logger = logging.getLogger(SERVE_LOGGER_NAME)

# Connections at once, if the process may open as many files: two sockets each, a pipe for every
# fourth, and some of its own.
MAX_CONNECTIONS, FILES_EACH, OWN_FILES = 20_000, 2.5, 256
# Which calls are made again at another router, and how often: `configuration` says of which kind.
REPEATED = "conn-failure empty-response"
REPEATS, BUFFER_BYTES = 3, 65_536
# Connections to a router that must fail until HAProxy asks others, or Serve's own proxy, in which
# calls wait for a new router: one. A call that was at a router that died has been made once, and
# with Serve's three it had no attempt left for them. Health checks bring a router back in half a
# second that was only slow.
FAILURES = 1
# What a client gets where no router answers: errors of HAProxy's own have no reason.
_BODY = (
    b'{"error": {"message": "the server is not there at the moment", "type": "server_error", '
    b'"param": null, "code": null}}'
)
UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Cache-Control: no-cache\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
) % (len(_BODY), _BODY)
POLL_INTERVAL = 0.05  # seconds between two looks whether a HAProxy that was taken over runs
# Seconds until HAProxy is started once more, where that has failed; the last one stays.
RETRY_INTERVALS = (0.1, 0.2, 0.5, 1.0, 2.0)

_actor: Any = haproxy.HAProxyManager
_Manager: Any = _actor.__ray_metadata__.modified_class.__ray_actor_class__


class TakenOver:
    """A HAProxy that another manager has started, as asyncio shows a process."""

    def __init__(self, pid: int, api: haproxy.HAProxyApi) -> None:
        self.pid = pid
        self._api = api
        # Where Serve looks for what it has said; the manager before knew.
        self._stdout_path = self._stderr_path = os.devnull

    @property
    def returncode(self) -> int | None:
        """Its exit code as far as anyone can know."""
        return None if self._api._is_our_haproxy(self.pid) else -1

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            os.kill(self.pid, 9)

    async def wait(self) -> int:
        """Return when it has ended."""
        while (code := self.returncode) is None:
            await asyncio.sleep(POLL_INTERVAL)
        return code


class KeptHAProxy(haproxy.HAProxyApi):
    """HAProxy that is started or taken over, has limits of ours, and is started again."""

    is_stopping = False

    def __init__(self, cfg: haproxy.HAProxyConfig, *arguments: Any, **options: Any) -> None:
        cfg.maxconn = max_connections()
        self._door = FrontDoor.of()
        cfg.timeout_client_s = self._door.idle_timeout
        cfg.retry_on, cfg.retries, cfg.bufsize = REPEATED, REPEATS, BUFFER_BYTES
        cfg.observe_error_limit = FAILURES
        super().__init__(cfg, *arguments, **options)
        self._certificate = _certificate(self._door, Path(self.config_file_path).parent)

    def _generate_config_file_internal(self) -> None:
        super()._generate_config_file_internal()
        file = Path(self.config_file_path)
        most = self._door.max_connections_per_address
        limits = Limits(
            certificate=None if self._certificate is None else self._certificate.target,
            per_address=self.cfg.maxconn // 4 if most is None else most,
        )
        text = configured(file.read_text(), self._door, limits)
        tls = node_tls()
        if tls is not None:
            authority, certificate, key = tls.files()
            link = link_certificate(file.parent, certificate, key)
            text = with_router_tls(text, str(authority), str(link))
        file.write_text(text)

    def _initialize_directories_and_error_files(self) -> None:
        super()._initialize_directories_and_error_files()
        assert self.cfg.error_file_path is not None, "Serve has written one"
        Path(self.cfg.error_file_path).write_bytes(UNAVAILABLE)

    async def start(self) -> None:
        """Take over what a manager that died has left, be it a configuration; else begin anew.

        Raises:
            OSError, ValueError: if there is no certificate to begin with.
        """
        pem = None if self._certificate is None else self._certificate.prepare()
        pid = await self._get_running_pid()
        if pid is not None and self._is_our_haproxy(pid):
            logger.info("Taking over HAProxy (pid=%d), which goes on as it was.", pid)
            taken_over: Any = TakenOver(pid, self)
            self._proc = taken_over
            if pem is not None:
                await self._give_certificate(pem)
            return
        if Path(self.config_file_path).exists():
            with suppress(RuntimeError):  # it is logged
                await self._restart()
                return
        await super().start()

    async def stop(self) -> None:
        """End HAProxy for good."""
        self.is_stopping = True
        await super().stop()
        Path(self.config_file_path).unlink(missing_ok=True)

    async def keep(self, reload_lock: asyncio.Lock) -> None:
        """Start HAProxy again whenever it dies; the lock is held while it is reloaded."""
        failures = 0
        while not self.is_stopping:
            process = self._proc
            assert process is not None, "only a stop forgets it"
            await process.wait()
            async with reload_lock:
                if self._proc is not process or self.is_stopping:
                    continue  # a reload has replaced it
                logger.error("HAProxy (pid=%d) has died: it is started again.", process.pid)
                try:
                    await self._restart()
                    failures = 0
                except Exception:
                    logger.exception("HAProxy cannot be started.")
                    failures += 1
            if failures:
                await asyncio.sleep(RETRY_INTERVALS[min(failures, len(RETRY_INTERVALS)) - 1])

    async def follow_certificate(self, reload_lock: asyncio.Lock) -> None:
        """Give HAProxy each certificate that comes; the lock is held while it is reloaded."""
        if self._certificate is None:
            return

        async def take(pem: str) -> None:
            async with reload_lock:
                await self._give_certificate(pem)

        await self._certificate.run(take)

    async def _give_certificate(self, pem: str) -> None:
        """Let new connections have another certificate; those that are there go on.

        Raises:
            ValueError: if HAProxy is not there, or does not take it.
        """
        assert self._certificate is not None, "without TLS nobody asks"
        name = self._certificate.target
        try:
            told = await self._send_socket_command(f"set ssl cert {name} <<\n{pem}")
            if "ransaction" in told:
                told = await self._send_socket_command(f"commit ssl cert {name}")
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if "Success" not in told:
            with suppress(RuntimeError):
                await self._send_socket_command(f"abort ssl cert {name}")
            raise ValueError(f"HAProxy does not take it: {' '.join(told.split())[:300]}")

    async def _restart(self) -> None:
        # The states of routers in it are those of the last reload.
        Path(self.cfg.server_state_file).unlink(missing_ok=True)
        # Its configuration lies there, with all routers.
        self._proc = await self._start_and_wait_for_haproxy()


class KeptHAProxyManager(_Manager):  # type: ignore[misc]
    """Serve's manager, with a HAProxy that is kept."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        haproxy.HAProxyApi = KeptHAProxy  # type: ignore[misc]
        super().__init__(*arguments, **options)
        set_log_level("WARNING")
        self._keeping = self.event_loop.create_task(self._keep())
        _start_guard(os.path.dirname(self._haproxy.config_file_path))

    async def _keep(self) -> None:
        await self._haproxy_start_task
        await asyncio.gather(
            self._haproxy.keep(self._reload_lock),
            self._haproxy.follow_certificate(self._reload_lock),
        )


def _certificate(door: FrontDoor, folder: Path) -> CertificateWatcher | None:
    if door.tls_cert is None:
        return None
    assert door.tls_key is not None, "whoever has written the environment gives both"
    return CertificateWatcher(Path(door.tls_cert), Path(door.tls_key), folder / "certificate.pem")


def max_connections() -> int:
    """Return how many connections HAProxy can have with the files that it may open."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, int((files - OWN_FILES) / FILES_EACH)))


def _start_guard(folder: str) -> None:
    """Start what ends HAProxy when the node's raylet is gone; it needs nothing but Python."""
    raylet = os.environ.get("RAY_RAYLET_PID")
    if raylet is None:
        return
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, raylet, folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ray ends the process group of a worker that dies
        )


def install() -> None:
    """Let Serve's controller, in whose process this runs, make managers of this kind."""
    from ray.serve._private import controller  # it is large, and managers do not need it

    module: Any = controller
    module.HAProxyManager = ray.remote(num_cpus=0)(KeptHAProxyManager)
