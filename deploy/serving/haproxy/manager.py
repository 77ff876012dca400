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
from deploy.serving.haproxy.router_tls import link_certificate, with_router_tls
from worker.tls import node_tls

logger = logging.getLogger(SERVE_LOGGER_NAME)

# Connections at once, if the process may open as many files: two sockets each, a pipe for every
# fourth, and some of its own.
MAX_CONNECTIONS, FILES_EACH, OWN_FILES = 20_000, 2.5, 256
# Seconds that a client may take to send the head of a request, and to go on with a body or to take
# more of an answer. Neither counts while it waits for an answer.
HEAD_TIMEOUT, IDLE_TIMEOUT = 20, 120
# A call is made again, at another router, where the first one ended before a byte of its answer:
# the schedulers have heard that it ended, and what it would have computed comes again. Calls that
# change something are not. What is larger than a buffer cannot be.
REPEATED = "conn-failure empty-response"
REPEATS, BUFFER_BYTES = 2, 65_536
NOT_REPEATED = (
    "http-request disable-l7-retry unless METH_GET or "
    "{ path_end /completions /tokenize /detokenize }"
)
# Routers see HAProxy's address; the audit log is to tell the client's.
FORWARDED = "option forwardfor"
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
        cfg.timeout_client_s = IDLE_TIMEOUT
        cfg.retry_on, cfg.retries, cfg.bufsize = REPEATED, REPEATS, BUFFER_BYTES
        super().__init__(cfg, *arguments, **options)

    def _generate_config_file_internal(self) -> None:
        super()._generate_config_file_internal()
        file = Path(self.config_file_path)
        # With `splice-request`, HAProxy does not see that a client leaves if head and body of its
        # request came apart.
        limit = f"timeout http-request {HEAD_TIMEOUT}s"
        text = file.read_text().replace("option splice-request", limit)
        front = "frontend http_frontend\n"
        assert front in text, "Serve calls it something else"
        tls = node_tls()
        if tls is not None:
            authority, certificate, key = tls.files()
            link = link_certificate(file.parent, certificate, key)
            text = with_router_tls(text, str(authority), str(link))
        file.write_text(text.replace(front, f"{front}    {NOT_REPEATED}\n    {FORWARDED}\n"))

    def _initialize_directories_and_error_files(self) -> None:
        super()._initialize_directories_and_error_files()
        assert self.cfg.error_file_path is not None, "Serve has written one"
        Path(self.cfg.error_file_path).write_bytes(UNAVAILABLE)

    async def start(self) -> None:
        """Take over what a manager that died has left, be it a configuration; else begin anew."""
        pid = await self._get_running_pid()
        if pid is not None and self._is_our_haproxy(pid):
            logger.info("Taking over HAProxy (pid=%d), which goes on as it was.", pid)
            taken_over: Any = TakenOver(pid, self)
            self._proc = taken_over
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
        self._keeping = self.event_loop.create_task(self._keep())
        _start_guard(os.path.dirname(self._haproxy.config_file_path))

    async def _keep(self) -> None:
        await self._haproxy_start_task
        await self._haproxy.keep(self._reload_lock)


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
