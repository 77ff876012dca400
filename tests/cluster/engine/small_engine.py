"""An engine over real sockets whose ranks are fakes in threads, and routers connected to it."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from ray.exceptions import WorkerCrashedError

from cluster.engine.core import SupervisorConfig
from cluster.engine.engine import Engine, EngineConfig
from cluster.engine.recording import RecordingConfig
from cluster.errors import NotFound
from cluster.messages import (
    Events,
    SchedulerAddress,
    Status,
    StatusCall,
    Submit,
    Unloaded,
    decode_scheduler_frame,
    encode,
)
from cluster.request import BASE, Request, TokenEvent, parts_of
from cluster.scheduler.config import SchedulerConfig
from tests.patience import PATIENCE
from worker.engine.step_server import serve_steps
from worker.errors import UnusableAdapter
from worker.pools import PageCounts
from worker.protocol import DIGEST_BYTES, Plan, RankInfo, SamplingParams, StepReply
from worker.testing.fake_rank import FakeRank, fake_continuation
from worker.transport.channel import Channel, listen

SECRET = b"s" * 32


class TroubledRank(FakeRank):
    """A fake rank that can be made to fail or to hang in its next step."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(page_size=4, num_slots=2, vocab_size=vocab_size)
        self.fails = False
        self.deadly_length = 0  # of a prompt that no step survives; 0: none
        self.hangs = threading.Event()
        self.freed = threading.Event()

    def step(self, frame: bytes) -> StepReply:
        if self.fails:
            raise RuntimeError("the memory is on fire")
        if self.hangs.is_set():
            self.freed.wait()
        if self.deadly_length and self._starts_deadly(frame):
            raise RuntimeError("a poisoned prompt")
        return super().step(frame)

    def _starts_deadly(self, frame: bytes) -> bool:
        plan = msgspec.msgpack.decode(frame[DIGEST_BYTES:], type=Plan)
        return any(start.num_prompt_tokens == self.deadly_length for start in plan.starts)


LOAD_ERRORS = {
    "odd": UnusableAdapter("layers.0.mlp.up_proj: its DoRA divides by zero"),
    "deadly": WorkerCrashedError(),
}


async def compiled_at_once(grammar: str) -> bool:
    return True


class ThreadHandle:
    """A rank in a thread of this process, with the face of an actor's handle."""

    def __init__(self, index: int, vocab_size: int) -> None:
        self.rank = TroubledRank(vocab_size)
        self.fails_to_clear = False
        self.compiler = compiled_at_once
        self._index = index

    async def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def load(self, store: tuple[str, int]) -> RankInfo:
        return self.rank.load(PageCounts(64 + self._index), PageCounts(8 + self._index))

    async def serve(self, pages: PageCounts, host_pages: PageCounts) -> tuple[str, int]:
        self.rank.allocate(pages, host_pages)
        server = listen("127.0.0.1")

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # what a troubled rank ends with
                serve_steps(self.rank, server, SECRET)  # type: ignore[arg-type]

        threading.Thread(target=run, daemon=True).start()
        host, port = server.getsockname()
        return host, port

    async def load_adapter(
        self, slot: int, adapter: str, weights: tuple[float, ...], shards: tuple[Any, ...]
    ) -> int:
        assert shards == tuple(digest for digest, _ in parts_of(adapter))
        if self._index == 1 and adapter in LOAD_ERRORS:
            raise LOAD_ERRORS[adapter]
        assert weights == tuple(weight for _, weight in parts_of(adapter))
        self.rank.load_adapter(slot, adapter, weights)
        return 100 * len(shards) + self._index

    async def clear_slot(self, slot: int, adapter: str) -> None:
        if self.fails_to_clear:
            raise WorkerCrashedError
        self.rank.clear_slot(slot, adapter)

    async def prepare_grammar(self, grammar: str) -> bool:
        return await self.compiler(grammar)


class ThreadLauncher:
    secret = SECRET

    def __init__(self) -> None:
        self.handles: list[ThreadHandle] = []
        self.launches = 0
        self.deadly_length = 0
        self.vocab_size = 1000
        self.gate = asyncio.Event()

    async def launch(self) -> tuple[ThreadHandle, ...]:
        await self.gate.wait()
        self.launches += 1
        self.handles = [ThreadHandle(i, self.vocab_size) for i in range(2)]
        for handle in self.handles:
            handle.rank.deadly_length = self.deadly_length
        return tuple(self.handles)

    def poison(self, length: int) -> None:
        """Let no rank survive a step that starts with a prompt of this length, now and later."""
        self.deadly_length = length
        for handle in self.handles:
            handle.rank.deadly_length = length

    async def kill(self, *, at_once: bool) -> None:
        for handle in self.handles:
            handle.rank.freed.set()
        self.handles = []


class ListedShards:
    """A pool that knows some digests."""

    def __init__(self, *digests: str) -> None:
        self._digests = digests

    async def shards(self, adapter: str) -> tuple[Any, ...]:
        digests = [digest for digest, _ in parts_of(adapter)]
        for digest in digests:
            if digest not in self._digests:
                raise NotFound(f"adapter {digest} has been unloaded")
        return tuple((digest, digest) for digest in digests)

    async def prefetch(self, adapter: str) -> None:
        await self.shards(adapter)


class RouterEnd:
    """The router's side of a connection, reduced to what tests need."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._events: dict[str, list[TokenEvent]] = {}  # that `collect` has not returned

    def send(self, message: Any) -> None:
        self._channel.send(encode(message))

    async def receive(self) -> Any:
        message = decode_scheduler_frame(await self._channel.receive())
        if isinstance(message, Events):
            for event in message.events:
                self._events.setdefault(event.request_id, []).append(event)
        return message

    async def collect(self, *request_ids: str) -> dict[str, list[TokenEvent]]:
        """Return all events of the requests, up to the end of each."""
        while not all(self._has_ended(request_id) for request_id in request_ids):
            await self.receive()
        return {request_id: self._events.pop(request_id) for request_id in request_ids}

    def _has_ended(self, request_id: str) -> bool:
        events = self._events.get(request_id)
        return bool(events) and events[-1].finish_reason is not None

    async def status(self) -> Status:
        self.send(StatusCall(7))
        while not isinstance(message := await self.receive(), Status):
            pass
        return message

    def close(self) -> None:
        self._channel.close()


class World:
    """A running engine and everything around it."""

    def __init__(self, engine: Engine, launcher: ThreadLauncher) -> None:
        self.launcher = launcher
        self.engine = engine
        self.address = SchedulerAddress("", "", 0, b"")
        self._routers: list[RouterEnd] = []

    async def connect(self) -> RouterEnd:
        address = self.address
        channel = await Channel.connect((address.host, address.port), address.secret)
        self._routers.append(RouterEnd(channel))
        return self._routers[-1]

    async def close(self) -> None:
        for router in self._routers:
            router.close()
        await self.engine.close()


@asynccontextmanager
async def world_with(
    *digests: str,
    start_timeout: float = 30.0,
    step_timeout: float = 30.0,
    recovery_timeout: float = 30.0,
    request_timeout: float | None = None,
    open_gate: bool = True,
    recording: RecordingConfig | None = None,
) -> AsyncIterator[World]:
    launcher = ThreadLauncher()
    if open_gate:
        launcher.gate.set()
    scheduler = SchedulerConfig(
        base_digest="b",
        num_pages=0,
        page_size=4,
        max_model_len=128,
        num_slots=2,
        max_running=8,
        max_waiting=4,
        token_budget=16,
        max_chunk=16,
    )
    config = EngineConfig(
        replica="0",
        ranks=SupervisorConfig(
            scheduler=scheduler,
            start_timeout=start_timeout,
            step_timeout=step_timeout,
            restart_delay=0.01,
            recovery_timeout=recovery_timeout,
        ),
        request_timeout=request_timeout,
        recording=recording,
    )
    world = World(Engine(config, launcher, ListedShards(*digests)), launcher)
    world.address = await world.engine.start("127.0.0.1")
    try:
        yield world
    finally:
        await world.close()


async def until_ready(router: RouterEnd) -> Status:
    async with asyncio.timeout(PATIENCE):
        while not (status := await router.status()).ready:
            await asyncio.sleep(0.01)
    return status


def ask(request_id: str, adapter: str = BASE, n: int = 6, length: int = 9) -> Submit:
    prompt = tuple(range(3, 3 + length))
    return Submit((Request(request_id, adapter, prompt, SamplingParams(), max_tokens=n),))


def ask_choices(*request_ids: str, n: int = 6, length: int = 9) -> Submit:
    """Return one prompt with a choice for each id, of seeds 0, 1, 2, ..."""
    prompt = tuple(range(3, 3 + length))
    return Submit(
        tuple(
            Request(request_id, BASE, prompt, SamplingParams(seed=seed), max_tokens=n)
            for seed, request_id in enumerate(request_ids)
        )
    )


def token_ids(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


def expected(
    adapter: str | None = None, n: int = 6, length: int = 9, seed: int = 0
) -> tuple[int, ...]:
    return fake_continuation(adapter, tuple(range(3, 3 + length)), n, seed=seed)


async def ends_until_unloaded(router: RouterEnd) -> list[str]:
    """Return which requests end before the answer to an unload, in their order."""
    ended: list[str] = []
    while not isinstance(message := await router.receive(), Unloaded):
        if isinstance(message, Events):
            ended += [event.request_id for event in message.events if event.finish_reason]
    return ended
