"""A whole group of real ranks whose plans are changed on the wire: it stops, and says where.

The ranks are joined by the transport between processes, with a time-out of a minute: what ends
sooner has not been waited for.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.engine.executor import Executor, ExecutorFailed, FailureCause
from cluster.engine.step_limit import StepLimit
from tests.end_to_end.tiny_models import make_tiny_model
from tests.patience import PATIENCE
from tests.worker.group import join_in_threads
from tests.worker.tamperer import Change, Tamperer
from worker.distributed.communicator import Communicator
from worker.engine.rank import Rank
from worker.engine.step_server import serve_steps
from worker.errors import GroupBroken, PlanMismatch
from worker.pools import PageCounts
from worker.protocol import (
    GENESIS,
    Chunk,
    Plan,
    RankConfig,
    RankInfo,
    SamplingParams,
    SequenceStart,
    encode_plan,
)
from worker.transport.channel import listen

TP = 3
BAD_STEP = 4
SECRET = b"s" * 32


def unchanged(step: int, frame: bytes) -> list[bytes]:
    return [frame]


class ThreadHandle:
    """A rank in a thread of this process, behind a wire that changes its plans."""

    def __init__(self, model: Path, place: Communicator, change: Change) -> None:
        config = RankConfig(
            model_dir=str(model),
            rank=place.rank,
            tp=TP,
            dtype="float32",
            page_size=16,
            kv_memory_bytes=1 << 20,
            kv_host_memory_bytes=(4 + place.rank) << 16,
            num_slots=0,
            max_model_len=64,
            num_threads=None,
        )
        self.place = place
        self.error: Exception | None = None  # that ended the rank
        self.pages: tuple[PageCounts, PageCounts] | None = None
        self._rank = Rank(config, place)
        self._change = change
        self._thread: threading.Thread | None = None
        self._tamperer: Tamperer | None = None

    async def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def load(self, store: tuple[str, int]) -> RankInfo:
        return self._rank.load()

    async def serve(self, pages: PageCounts, host_pages: PageCounts) -> tuple[str, int]:
        self.pages = pages, host_pages
        self._rank.allocate(pages, host_pages)
        server = listen("127.0.0.1")

        def run() -> None:
            try:
                serve_steps(self._rank, server, SECRET)
            except (AssertionError, GroupBroken, PlanMismatch) as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self._tamperer = Tamperer(server.getsockname(), self._change)
        return self._tamperer.address

    def join(self) -> bool:
        """Wait until the rank has ended; False if it hangs."""
        assert self._thread is not None and self._tamperer is not None
        self._thread.join(PATIENCE)
        return self._tamperer.join(PATIENCE) and not self._thread.is_alive()


class ThreadLauncher:
    secret = SECRET

    def __init__(self, handles: tuple[ThreadHandle, ...]) -> None:
        self._handles = handles

    async def launch(self) -> tuple[Any, ...]:
        return self._handles

    async def kill(self, *, at_once: bool) -> None:
        """Leave it to the ranks to end: processes would be killed here."""


class Driver:
    """Sends the plans of one sequence: a prefill, then decodes."""

    def __init__(self, group: Executor, handles: tuple[ThreadHandle, ...]) -> None:
        self.group = group
        self.handles = handles
        self._digest = GENESIS
        self._tokens = [3, 1, 4, 1, 5]
        self._step = 0

    async def step(self) -> None:
        self._step += 1
        start = SequenceStart(1, None, SamplingParams(temperature=0.0), 5, (), 0, ())
        if self._step == 1:
            plan = Plan(1, (), (start,), (Chunk(1, 0, tuple(self._tokens), (2,), True),))
        else:
            at = len(self._tokens) - 1
            plan = Plan(self._step, (), (), (Chunk(1, at, (self._tokens[-1],), (), True),))
        frame, self._digest = encode_plan(plan, self._digest)
        self.group.send(frame, 1)
        output = await self.group.output(self._step)
        self._tokens.append(output.tokens[0].token_id)

    async def run(self) -> None:
        """Step until the group fails, whether or not a plan is on its way then."""
        while self._step < BAD_STEP:
            await self.step()
        await self.group.failed()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    make_tiny_model("llama", path)
    return path


@asynccontextmanager
async def running(
    model: Path, changes: dict[int, Change], step_timeout: float = PATIENCE
) -> AsyncIterator[Driver]:
    """Start a group where the plans of some ranks are changed; all must have ended afterwards."""
    places = join_in_threads(TP, timeout=PATIENCE)
    handles = tuple(ThreadHandle(model, p, changes.get(p.rank, unchanged)) for p in places)
    group = Executor(ThreadLauncher(handles), start_timeout=PATIENCE, limit=StepLimit(step_timeout))
    try:
        await group.start()
        yield Driver(group, handles)
    finally:
        await group.kill()
        ended = await asyncio.gather(*(asyncio.to_thread(handle.join) for handle in handles))
        for place in places:
            place.close()
    assert ended == [True] * TP


def at_bad_step(change: Callable[[bytes], list[bytes]]) -> Change:
    return lambda step, frame: change(frame) if step == BAD_STEP else [frame]


def flip(frame: bytes, bit: int) -> bytes:
    changed = bytearray(frame)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


TAMPERS: dict[str, Change] = {
    "a bit of the digest": at_bad_step(lambda frame: [flip(frame, 100)]),
    "a bit of the step": at_bad_step(lambda frame: [flip(frame, 8 * 33)]),
    "a bit of the body": at_bad_step(lambda frame: [flip(frame, 8 * len(frame) - 3)]),
    "twice": lambda step, frame: [frame] * (2 if step == BAD_STEP - 1 else 1),
}


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("change", TAMPERS.values(), ids=TAMPERS)
async def test_a_changed_plan_stops_the_whole_group_and_names_the_step(model, change, victims):
    async with running(model, dict.fromkeys(victims, change)) as driver:
        with pytest.raises(ExecutorFailed, match=f"failed in step {BAD_STEP}: ") as caught:
            await asyncio.wait_for(driver.run(), PATIENCE)
    assert caught.value.cause is FailureCause.PLAN_MISMATCH
    for rank in victims:
        error = driver.handles[rank].error
        assert isinstance(error, PlanMismatch)
        assert error.step == BAD_STEP


async def test_a_rank_that_misses_a_plan_is_named_and_refuses_the_next(model):
    missing = at_bad_step(lambda frame: [])
    async with running(model, {1: missing}, step_timeout=2.0) as driver:
        with pytest.raises(ExecutorFailed, match=f"did not answer step {BAD_STEP} within"):
            await asyncio.wait_for(driver.run(), PATIENCE)
        # What a scheduler must not do, the others being inside a collective: go on all the same.
        with pytest.raises(ExecutorFailed, match=f"failed in step {BAD_STEP}: "):
            await asyncio.wait_for(driver.step(), PATIENCE)
    error = driver.handles[1].error
    assert isinstance(error, PlanMismatch)
    assert error.step == BAD_STEP
    assert isinstance(driver.handles[0].error, GroupBroken)
    assert isinstance(driver.handles[2].error, GroupBroken)


async def test_the_smallest_budgets_decide_the_pages_of_every_rank(model):
    async with running(model, {}) as driver:
        group = driver.group
        assert group.pages.full == min(info.max_pages.full for info in group.infos)
        assert group.host_pages == group.infos[0].max_host_pages
        assert group.infos[0].max_host_pages.full < group.infos[1].max_host_pages.full
        given = [handle.pages for handle in driver.handles]
        assert given == [(group.pages, group.host_pages)] * TP
