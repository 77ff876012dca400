"""All ranks of one scheduler as one thing: started, stepped and ended together.

Owns the connections to the ranks, what each of them is at, and the verdict that the group has
failed: a closed connection, an error that a rank reports, or a step that is not answered in time.
Processes are made and killed by a launcher: `deploy` and tests each have their own.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec
from ray.exceptions import ActorDiedError, RayError, RayTaskError, WorkerCrashedError

from cluster.engine.step_limit import StepLimit
from cluster.errors import Internal, InvalidAdapter, TopworkError, Unavailable
from cluster.request import parts_of
from worker.errors import GroupBroken, PlanMismatch, UnusableAdapter
from worker.pools import NO_PAGES, PageCounts, fewest
from worker.protocol import RankInfo, StepOutput, StepReply
from worker.transport.channel import BadFrame, Channel, ChannelClosed

LAST_LOOK = 0.2  # seconds that answers are read for when time is up
CAUSE_TIMEOUT = 0.5  # seconds that a rank which lost its peers waits for one of them to say why

# A rank reports an error as its class and what it says.
_SYMPTOM = f"{GroupBroken.__name__}: "
_MISMATCH = f"{PlanMismatch.__name__}: "


class FailureCause(StrEnum):
    """What a group of ranks is lost for, as operators count it."""

    START = "start"  # it never took a plan
    PLAN_MISMATCH = "plan_mismatch"  # a rank has seen other plans than the scheduler has made
    STEP_TIMEOUT = "step_timeout"
    RANK_GONE = "rank_gone"
    RANK_ERROR = "rank_error"  # that a rank reported of a step
    ADAPTER_LOAD = "adapter_load"
    SLOT_CLEAR = "slot_clear"


class ExecutorFailed(Exception):
    """The group cannot go on; everything it was doing is lost."""

    def __init__(self, reason: str, cause: FailureCause) -> None:
        super().__init__(reason, cause)
        self.reason = reason
        self.cause = cause

    def __str__(self) -> str:
        return self.reason


class RankHandle(Protocol):
    """One rank as the launcher made it; calls return at once with something to await."""

    def rendezvous(self) -> Awaitable[tuple[str, int]]: ...
    def load(self, store: tuple[str, int]) -> Awaitable[RankInfo]: ...
    def measure_pages(self) -> Awaitable[PageCounts]: ...
    def serve(self, pages: PageCounts, host_pages: PageCounts) -> Awaitable[tuple[str, int]]: ...
    def load_adapter(
        self, slot: int, adapter: str, weights: tuple[float, ...], shards: tuple[Any, ...]
    ) -> Awaitable[int]: ...
    def clear_slot(self, slot: int, adapter: str) -> Awaitable[None]: ...
    def prepare_grammar(self, grammar: str) -> Awaitable[bool]: ...


class RankLauncher(Protocol):
    """Makes and ends rank processes; implemented in deploy, the only place that makes actors."""

    secret: bytes

    async def launch(self) -> tuple[RankHandle, ...]:
        """Make one process for each rank and return handles in rank order."""

    async def kill(self, *, at_once: bool) -> None:
        """End every process of the last launch, with time to end by itself or `at_once`."""


DEATHS = (ActorDiedError, WorkerCrashedError)  # what a call raises whose rank's process is gone


def _load_error(error: BaseException) -> TopworkError:
    """Return what an adapter's requests are told of a load that failed on a rank that lives."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, UnusableAdapter):
        return InvalidAdapter(str(cause))
    if isinstance(cause, RayError):  # shards that are lost with the pool, or late
        return Unavailable(f"the adapter's shards cannot be fetched: {cause}", retry_after=1)
    return Internal(f"a rank could not load the adapter: {cause}")


class Executor:
    """A running group of ranks; `clock` gives seconds."""

    def __init__(
        self,
        launcher: RankLauncher,
        start_timeout: float,
        limit: StepLimit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launcher = launcher
        self._clock = clock
        self._start_timeout = start_timeout  # seconds until all ranks must take plans
        self._limit = limit  # of what a step may take
        self._handles: tuple[RankHandle, ...] = ()
        self._channels: list[Channel] = []
        self._readers: list[asyncio.Task[None]] = []
        self._replies: dict[int, list[tuple[int, StepReply]]] = {}  # by step in flight
        self._num_rows: deque[int] = deque()  # of the steps in flight
        self._awaited_step = 0
        self._waiter: asyncio.Future[None] | None = None  # for the answers to that step
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_unanswered: list[int] = []  # steps that each rank has been sent
        self._is_hung = False
        self._busy_since: list[float] = []  # when each rank could begin the first of them
        # By rank:
        self.infos: tuple[RankInfo, ...] = ()
        self.alive: list[bool] = []  # whether it still takes plans, as far as is known
        self.last_step: list[int] = []  # that it has answered
        # Of every rank:
        self.pages = NO_PAGES
        self.host_pages = NO_PAGES

    async def start(self) -> None:
        """Bring all ranks up to the point where they take plans.

        Raises:
            ExecutorFailed: if a rank cannot be started, with its reason.
        """
        try:
            async with asyncio.timeout(self._start_timeout):
                await self._bring_up()
        except TimeoutError:
            reason = f"the ranks did not start in {self._start_timeout:g} s"
            raise ExecutorFailed(reason, FailureCause.START) from None
        except (RayError, OSError) as error:
            reason = f"the ranks did not start: {error}"
            raise ExecutorFailed(reason, FailureCause.START) from error
        num_ranks = len(self._channels)
        self.alive = [True] * num_ranks
        self.last_step = [0] * num_ranks
        self._num_unanswered = [0] * num_ranks
        self._busy_since = [0.0] * num_ranks
        self._readers = [
            asyncio.create_task(self._read(rank, channel))
            for rank, channel in enumerate(self._channels)
        ]

    async def _bring_up(self) -> None:
        self._handles = await self._launcher.launch()
        store = await self._handles[0].rendezvous()
        self.infos = tuple(await asyncio.gather(*(h.load(store) for h in self._handles)))
        # All ranks must agree on the page numbers, so the smallest budget decides.
        self.pages = fewest(await self._max_pages())
        self.host_pages = fewest(info.max_host_pages for info in self.infos)
        addresses = await asyncio.gather(
            *(handle.serve(self.pages, self.host_pages) for handle in self._handles)
        )
        for address in addresses:
            self._channels.append(await Channel.connect(address, self._launcher.secret))

    async def _max_pages(self) -> Sequence[PageCounts]:
        """Return the pages that each rank has memory for; GPUs are asked once all have loaded."""
        known = [info.max_pages for info in self.infos if info.max_pages is not None]
        if len(known) == len(self.infos):
            return known
        return await asyncio.gather(*(handle.measure_pages() for handle in self._handles))

    def send(self, frame: bytes, num_rows: int) -> None:
        """Send one plan, of so many rows, to every rank; `output` waits for what comes of it.

        They may still be at the plan before it.
        """
        now = self._clock()
        self._num_rows.append(num_rows)
        for rank, channel in enumerate(self._channels):
            channel.send(frame)
            if not self._num_unanswered[rank]:
                self._busy_since[rank] = now
            self._num_unanswered[rank] += 1

    def step_age(self, rank: int) -> float:
        """Return for how many seconds a rank has been at its step; 0 if it has answered all."""
        return self._clock() - self._busy_since[rank] if self._num_unanswered[rank] else 0.0

    def late_ranks(self) -> list[int]:
        """Return the ranks that have been at their step for half of what it may take, or more."""
        if not self._num_rows:
            return []
        limit = self._limit.of(self._num_rows[0]) / 2
        return [rank for rank in range(len(self.alive)) if self.step_age(rank) >= limit]

    async def has_answered(self, step: int, within: float) -> bool:
        """Wait for the answers to a step, at most `within` seconds; tell whether all are here.

        Also true if they cannot come any more: `output` says why.
        """
        if within > 0:
            timer = asyncio.get_running_loop().call_later(within, self._wake)
            try:
                await self._wait(step)
            finally:
                timer.cancel()
        return self._has_all(step) or self._failure.done()

    async def output(self, step: int) -> StepOutput:
        """Return what rank 0 sampled in a step that was sent, once all ranks have answered.

        Steps are asked for in their order.

        Raises:
            ExecutorFailed: if a rank is gone, reports an error or does not answer in time.
        """
        began = self._clock()
        num_rows = self._num_rows[0]
        limit = self._limit.of(num_rows)
        try:
            async with asyncio.timeout(limit):
                await self._until_answered(step)
        except TimeoutError:
            # This process may have stood still itself: what came meanwhile is read first.
            if not await self.has_answered(step, LAST_LOOK):
                late = [rank for rank, last in enumerate(self.last_step) if last < step]
                reason = f"rank {late} did not answer step {step} within {limit:g} s"
                self._is_hung = True
                raise ExecutorFailed(reason, FailureCause.STEP_TIMEOUT) from None
            await self._until_answered(step)
        self._num_rows.popleft()
        self._limit.measured(num_rows, self._clock() - began)
        output: StepOutput | None = None
        for rank, reply in self._replies.pop(step):
            output = reply.output if rank == 0 else output
        assert output is not None, f"rank 0 sent no output for step {step}"
        return output

    async def _until_answered(self, step: int) -> None:
        self._raise_if_failed()
        while not self._has_all(step):
            await self._wait(step)
            self._raise_if_failed()

    async def failed(self) -> None:
        """Wait until the group fails.

        Raises:
            ExecutorFailed: when it does.
        """
        await asyncio.shield(self._failure)

    async def load_adapter(
        self, slot: int, adapter: str, parts: tuple[tuple[Any, ...], ...]
    ) -> tuple[int, ...]:
        """Put an adapter into a slot of every rank; returns when all have acknowledged.

        Args:
            slot: where to.
            adapter: a digest, or a weighted sum of several.
            parts: of each part, in the order of `parts_of`, one shard handle for each rank.

        Returns:
            The bytes that it holds on each rank's device.

        Raises:
            InvalidAdapter: if a rank cannot compute it; the others may have it in the slot now.
            Unavailable: if the shards are lost or late.
            Internal: if a rank fails otherwise.
            ExecutorFailed: if a rank is gone.
        """
        weights = tuple(weight for _, weight in parts_of(adapter))
        assert len(parts) == len(weights) > 0, f"{len(parts)} parts for {adapter}"
        assert all(len(part) == len(self._handles) for part in parts), "one shard for each rank"
        calls = [
            handle.load_adapter(slot, adapter, weights, shards)
            for handle, shards in zip(self._handles, zip(*parts, strict=True), strict=True)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if isinstance(error, DEATHS):
                reason = f"a rank died while it loaded an adapter: {error}"
                failure = ExecutorFailed(reason, FailureCause.ADAPTER_LOAD)
                self._fail(failure)
                raise failure from error
        failures = [_load_error(error) for error in errors]
        refusals = [failure for failure in failures if isinstance(failure, InvalidAdapter)]
        if failures:
            raise (refusals or failures)[0]
        return tuple(result for result in results if not isinstance(result, BaseException))

    async def prepare_grammar(self, grammar: str) -> None:
        """Let the rank that draws compile a grammar beside its steps; returns when it has.

        Also if it is not up or gone: whoever waits for its steps finds out.
        """
        if not self.alive:
            return
        try:
            while not await self._handles[0].prepare_grammar(grammar):
                pass
        except RayError:
            return

    def clear_slots(self, slots: Iterable[tuple[int, str]]) -> Awaitable[None]:
        """Free the memory of slots on every rank, of each if it still holds that adapter.

        What is loaded after this call is loaded after the slots are clear, awaited or not. Waiting
        for them raises ExecutorFailed if a rank cannot, and the group has failed then.
        """
        calls = [h.clear_slot(slot, adapter) for slot, adapter in slots for h in self._handles]
        return asyncio.ensure_future(self._await_clear(asyncio.gather(*calls)))

    async def _await_clear(self, calls: Awaitable[list[None]]) -> None:
        try:
            await calls
        except RayError as error:
            reason = f"a rank failed while it cleared a slot: {error}"
            failure = ExecutorFailed(reason, FailureCause.SLOT_CLEAR)
            self._fail(failure)  # what the slot holds is not known
            raise failure from error

    async def kill(self) -> None:
        """End all ranks; the group is of no use afterwards."""
        for reader in self._readers:
            reader.cancel()
        for channel in self._channels:
            channel.close()
        if not self._failure.done():
            self._failure.cancel()
        await self._launcher.kill(at_once=self._is_hung)

    async def _read(self, rank: int, channel: Channel) -> None:
        """Take in the replies of a rank, until it fails."""
        decoder = msgspec.msgpack.Decoder(StepReply)
        try:
            while True:
                reply = decoder.decode(await channel.receive())
                if reply.error is not None:
                    self.alive[rank] = False
                    await self._take_error(rank, reply.step, reply.error)
                    return
                self.last_step[rank] = reply.step
                self._num_unanswered[rank] -= 1
                self._busy_since[rank] = self._clock()  # with the step after it, if it has that
                self._replies.setdefault(reply.step, []).append((rank, reply))
                if self._has_all(self._awaited_step):
                    self._wake()
        except (ChannelClosed, BadFrame, msgspec.DecodeError) as error:
            self.alive[rank] = False
            self._fail(ExecutorFailed(f"rank {rank} is gone: {error}", FailureCause.RANK_GONE))

    async def _take_error(self, rank: int, step: int, error: str) -> None:
        if error.startswith(_SYMPTOM):
            await asyncio.sleep(CAUSE_TIMEOUT)
        is_mismatch = error.startswith(_MISMATCH)
        cause = FailureCause.PLAN_MISMATCH if is_mismatch else FailureCause.RANK_ERROR
        self._fail(ExecutorFailed(f"rank {rank} failed in step {step}: {error}", cause))

    def _has_all(self, step: int) -> bool:
        return len(self._replies.get(step, ())) == len(self._channels)

    async def _wait(self, step: int) -> None:
        """Wait until every rank has answered, the group has failed, or `_wake` is called."""
        if self._has_all(step) or self._failure.done():
            return
        self._awaited_step = step
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: ExecutorFailed) -> None:
        if not self._failure.done():
            self._failure.set_exception(failure)
            self._failure.exception()  # marks it as seen: nobody may be waiting
            self._wake()

    def _raise_if_failed(self) -> None:
        if self._failure.done():
            self._failure.result()
