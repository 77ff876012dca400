"""Which files one adapter chat request passes, from HTTP to the kernels and back.

The real parts in one process, without Ray: router under uvicorn, adapter pool, engine, one rank of
the demo model on the CPU. `python -m tests.end_to_end.request_path` prints the path.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import uvicorn

from cluster.adapters.service.pool_actor import AdapterPoolActor
from cluster.api.app import create_app
from cluster.engine.engine import Engine
from cluster.router.engine_client import EngineClient
from cluster.router.metrics import aggregation
from cluster.router.router import Router
from cluster.router.tenancy import budget_client
from deploy.config import ServeConfig
from deploy.engine_config import check_model
from deploy.serving.settings import (
    adapter_catalog,
    pool_config,
    router_config,
    scheduler_settings,
)
from tests.end_to_end.server import MODEL_DIR, adapter_dirs
from tests.patience import PATIENCE
from worker.distributed.communicator import SingleRank
from worker.engine.rank import Rank
from worker.engine.step_server import serve_steps
from worker.lora.shard import AdapterShard
from worker.pools import PageCounts
from worker.protocol import RankConfig, RankInfo
from worker.transport.channel import listen

ROOT = Path(__file__).parents[2]
TRACED = ("cluster", "worker", "kernels")
ADAPTER = "pirate"


class Trace:
    """The files of ours whose functions run while it records, in the order of their first call."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}  # path and the function that was called first
        self.is_recording = False
        self._names: dict[str, str | None] = {}

    def install(self) -> None:
        """See every thread that starts from now on, and this one."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def uninstall(self) -> None:
        """See nothing more."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self.is_recording:
            return
        code = frame.f_code
        if code.co_filename not in self._names:
            self._names[code.co_filename] = _path_of(code.co_filename)
        path = self._names[code.co_filename]
        if path is not None and path not in self.files:
            self.files[path] = code.co_qualname


def _path_of(filename: str) -> str | None:
    path = Path(filename)
    if not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return str(relative) if relative.parts[0] in TRACED else None


class LocalRank:
    """A rank in this process, as the executor asks one in another."""

    def __init__(self, config: RankConfig, secret: bytes) -> None:
        self._rank = Rank(config, SingleRank())
        self._secret = secret

    async def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def load(self, store: tuple[str, int]) -> RankInfo:
        return await asyncio.to_thread(self._rank.load)

    async def serve(self, pages: PageCounts, host_pages: PageCounts) -> tuple[str, int]:
        self._rank.allocate(pages, host_pages)
        server = listen("127.0.0.1")
        threading.Thread(
            target=serve_steps, args=(self._rank, server, self._secret), daemon=True
        ).start()
        host, port = server.getsockname()[:2]
        return str(host), int(port)

    async def load_adapter(
        self,
        slot: int,
        adapter: str,
        weights: tuple[float, ...],
        shards: tuple[AdapterShard, ...],
    ) -> int:
        return await asyncio.to_thread(self._rank.load_adapter, slot, adapter, weights, shards)

    async def clear_slot(self, slot: int, adapter: str) -> None:
        self._rank.clear_slot(slot, adapter)

    async def prepare_grammar(self, grammar: str) -> bool:
        return await asyncio.to_thread(self._rank.prepare_grammar, grammar)


class LocalLauncher:
    """Makes the one rank."""

    secret = b"s" * 32

    def __init__(self, config: RankConfig) -> None:
        self._config = config

    async def launch(self) -> tuple[LocalRank, ...]:
        return (LocalRank(self._config, self.secret),)

    async def kill(self, *, at_once: bool) -> None:
        """The rank ends with its connection."""


class LocalServer:
    """Router, adapter pool and engine of the demo model, in one event loop in a thread."""

    def __init__(self) -> None:
        config = ServeConfig(
            model=str(MODEL_DIR),
            served_model_name="smollm2",
            tp=1,
            device="cpu",
            max_loras=2,
            kv_cache_memory=64 << 20,
        )
        checked = check_model(config)
        settings = scheduler_settings(checked)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._settings = settings
        self._pool = self.call(self._make_pool(config, checked))
        self.call(self._start(checked, settings))

    def call(self, work: Any) -> Any:
        """Run a coroutine on the loop and return what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    async def _make_pool(self, config: ServeConfig, checked: Any) -> AdapterPoolActor:
        return AdapterPoolActor(
            pool_config(checked, ()), adapter_catalog(config), EngineClient.connect, lambda one: one
        )

    async def _start(self, checked: Any, settings: Any) -> None:
        pool = self._pool
        await pool.start({})
        engine = replace(settings.engine, replica="0")
        self._engine = Engine(engine, LocalLauncher(settings.rank), pool)
        await pool.attach(await self._engine.start("127.0.0.1"))
        await self._engine.wait_until_up()
        aggregation.INTERVAL = budget_client.INTERVAL = PATIENCE  # nothing beside the request
        config = replace(router_config(checked), refresh_interval=PATIENCE)
        self._router = Router(config, pool)
        await self._router.start()
        await self._router.replicas.refresh()
        await pool.load(ADAPTER, str(adapter_dirs()[ADAPTER]), False, False)
        self._server = uvicorn.Server(
            uvicorn.Config(create_app(self._router), port=0, log_level="critical", lifespan="off")
        )
        self._serving = asyncio.ensure_future(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def close(self) -> None:
        """End everything."""
        self.call(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()

    async def _close(self) -> None:
        self._server.should_exit = True
        await self._serving
        await self._router.close()
        await self._engine.close()
        await self._pool.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


@contextmanager
def traced_server() -> Iterator[tuple[LocalServer, Trace]]:
    """Yield a server and the trace of all its threads."""
    trace = Trace()
    trace.install()
    try:
        server = LocalServer()
        try:
            yield server, trace
        finally:
            server.close()
    finally:
        trace.uninstall()


def chat(server: LocalServer, model: str) -> str:
    """Ask one streamed chat question and return the answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    text = ""
    with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                text += delta.get("content") or ""
    return text


def request_path() -> dict[str, str]:
    """Return the files that a request to an adapter passes which no slot has yet, in order."""
    with traced_server() as (server, trace):
        chat(server, "smollm2")  # what is made once is made
        trace.is_recording = True
        answer = chat(server, ADAPTER)
        trace.is_recording = False
    assert answer, "the adapter said nothing"
    return trace.files


def main() -> None:
    """Print the path, one file a line, with the function that was called first."""
    files = request_path()
    for path, function in files.items():
        print(f"{path}  {function}")
    counts = {part: sum(path.startswith(part) for path in files) for part in TRACED}
    print(len(files), "files:", counts)


if __name__ == "__main__":
    main()
