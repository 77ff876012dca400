"""A group of ranks: what it says of them, and why it cannot go on."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from ray.exceptions import WorkerCrashedError

from cluster.engine.executor import Executor, ExecutorFailed, FailureCause
from cluster.engine.step_limit import StepLimit
from cluster.request import compose
from tests.cluster.engine.small_engine import ThreadLauncher
from tests.patience import PATIENCE
from worker.pools import PageCounts
from worker.protocol import RankInfo, StepReply
from worker.testing.fake_rank import FakeRank
from worker.transport.channel import Channel

SECRET = b"s" * 32


class ScriptedRank:
    """A rank that answers when the test says so."""

    def __init__(self, index: int) -> None:
        self.fails_to_clear = False
        self.measured: PageCounts | None = None  # what its GPU has left; None: it has no GPU
        self.has_loaded = False
        self.others: tuple[ScriptedRank, ...] = ()
        self._index = index
        self._server: asyncio.Server
        self._channel: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    async def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def load(self, store: tuple[str, int]) -> RankInfo:
        info = FakeRank(page_size=4).load()
        self.has_loaded = True
        return info if self.measured is None else replace(info, max_pages=None)

    async def measure_pages(self) -> PageCounts:
        assert self.measured is not None, "its pages are known"
        assert all(other.has_loaded for other in self.others)
        return self.measured

    async def serve(self, pages: PageCounts, host_pages: PageCounts) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    async def load_adapter(self, *_: Any) -> int:
        raise AssertionError("nobody loads here")

    async def clear_slot(self, slot: int, adapter: str) -> None:
        if self.fails_to_clear:
            raise WorkerCrashedError

    async def prepare_grammar(self, grammar: str) -> bool:
        raise AssertionError("nobody has a form here")

    async def reply(self, step: int, error: str | None = None) -> None:
        """Answer a step."""
        channel = await self._channel
        channel.send(msgspec.msgpack.encode(StepReply(step, error=error)))

    async def hang_up(self) -> None:
        """Close the connection, as the end of a process does."""
        (await self._channel).close()
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await Channel.accepted(reader, writer, SECRET)
        assert channel is not None
        self._channel.set_result(channel)


class ScriptedLauncher:
    secret = SECRET

    def __init__(self) -> None:
        self.ranks = tuple(ScriptedRank(index) for index in range(2))

    async def launch(self) -> tuple[ScriptedRank, ...]:
        return self.ranks

    async def kill(self, *, at_once: bool) -> None:
        for rank in self.ranks:
            await rank.hang_up()


@asynccontextmanager
async def running(
    clock: Callable[[], float] = lambda: 0.0,
) -> AsyncIterator[tuple[Executor, tuple[ScriptedRank, ...]]]:
    """Run a group of two ranks."""
    launcher = ScriptedLauncher()
    group = Executor(launcher, PATIENCE, StepLimit(PATIENCE), clock)
    await group.start()
    try:
        yield group, launcher.ranks
    finally:
        await group.kill()


async def until(is_so: Callable[[], bool]) -> None:
    """Let the event loop turn until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not is_so():
            await asyncio.sleep(0)


async def failure_of(group: Executor) -> ExecutorFailed:
    """Wait until a group has failed."""
    with pytest.raises(ExecutorFailed) as caught:
        await asyncio.wait_for(group.failed(), PATIENCE)
    return caught.value


def test_a_failure_that_has_travelled_says_the_same() -> None:
    sent = ExecutorFailed("rank 1 is gone: the peer closed the connection", FailureCause.RANK_GONE)
    got = pickle.loads(pickle.dumps(sent))
    assert (str(got), got.cause) == (str(sent), FailureCause.RANK_GONE)
    assert str(got) == "rank 1 is gone: the peer closed the connection"


async def test_a_group_says_what_an_adapter_holds_on_each_rank() -> None:
    launcher = ThreadLauncher()
    launcher.gate.set()
    group = Executor(launcher, PATIENCE, StepLimit(PATIENCE))
    await group.start()
    assert await group.load_adapter(0, "cafe", (("cafe", "cafe"),)) == (100, 101)
    both = compose([("cafe", 2.0), ("fade", 1.0)])
    assert await group.load_adapter(1, both, (("cafe",) * 2, ("fade",) * 2)) == (200, 201)
    await group.kill()


async def test_gpus_are_asked_what_they_have_left_once_all_ranks_have_loaded() -> None:
    """In a step of all ranks: none may wait for one that still loads."""
    launcher = ScriptedLauncher()
    for rank, num_pages in zip(launcher.ranks, (90, 80), strict=True):
        rank.measured = PageCounts(num_pages)
        rank.others = launcher.ranks
    group = Executor(launcher, PATIENCE, StepLimit(PATIENCE))
    await group.start()
    assert group.pages == PageCounts(80)
    await group.kill()


async def test_each_rank_says_for_how_long_it_has_been_at_its_step() -> None:
    now = 100.0
    async with running(lambda: now) as (group, ranks):
        assert (group.step_age(0), group.step_age(1)) == (0.0, 0.0)
        group.send(b"the plan of step 1", 4)
        await ranks[0].reply(1)
        await until(lambda: group.last_step == [1, 0])
        now += 3.0
        assert (group.step_age(0), group.step_age(1)) == (0.0, 3.0)
        group.send(b"the plan of step 2", 4)  # while rank 1 is still at the step before it
        now += 2.0
        assert (group.step_age(0), group.step_age(1)) == (2.0, 5.0)
        await ranks[1].reply(1)  # it goes on with step 2 at once
        await until(lambda: group.last_step == [1, 1])
        now += 1.0
        assert (group.step_age(0), group.step_age(1)) == (3.0, 1.0)
        for rank in ranks:
            await rank.reply(2)
        await until(lambda: group.last_step == [2, 2])
        now += 1.0
        assert (group.step_age(0), group.step_age(1)) == (0.0, 0.0)


async def test_a_rank_that_has_gone_is_not_alive_and_the_others_are() -> None:
    async with running() as (group, ranks):
        assert group.alive == [True, True]
        await ranks[1].hang_up()
        failure = await failure_of(group)
        assert failure.reason.startswith("rank 1 is gone")
        assert failure.cause is FailureCause.RANK_GONE
        assert group.alive == [True, False]


async def test_a_rank_that_reports_an_error_takes_no_more_plans() -> None:
    async with running() as (group, ranks):
        group.send(b"the plan of step 1", 4)
        await ranks[0].reply(1, error="RuntimeError: on fire")
        failure = await failure_of(group)
        assert failure.reason == "rank 0 failed in step 1: RuntimeError: on fire"
        assert failure.cause is FailureCause.RANK_ERROR
        assert group.alive == [False, True]


async def test_a_rank_that_cannot_clear_a_slot_ends_the_group() -> None:
    async with running() as (group, ranks):
        await group.clear_slots([(0, "cafe")])
        ranks[1].fails_to_clear = True
        with pytest.raises(ExecutorFailed, match="while it cleared a slot"):
            await group.clear_slots([(0, "cafe")])
        assert (await failure_of(group)).cause is FailureCause.SLOT_CLEAR
