"""All ranks of one scheduler as one thing: started, stepped and ended together.

Owns the connections to the ranks and the verdict that the group has failed: a closed connection, an
error reported by a rank, or a step that no answer came to in time. Does not know what a plan says.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

import msgspec
from ray.exceptions import RayError, RayTaskError

from cluster.engine.failure import ExecutorFailed, FailureCause
from cluster.engine.launcher import RankHandle, RankLauncher
from cluster.errors import InvalidAdapter
from cluster.weighted_adapters import parts_of
from worker.channel import BadFrame, Channel, ChannelClosed
from worker.errors import GroupBroken
from worker.lora.shard import UnusableAdapter
from worker.protocol import PlanMismatch, RankInfo, StepOutput, StepReply

CAUSE_TIMEOUT = 0.5  # seconds that a rank which lost its peers waits for one of them to say why

# A rank reports an error as its class and what it says.
_SYMPTOM = f"{GroupBroken.__name__}: "
_MISMATCH = f"{PlanMismatch.__name__}: "


def _unusable(error: BaseException) -> UnusableAdapter | None:
    """Return what a rank says of an adapter that it cannot compute, if that is the error."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause if isinstance(cause, UnusableAdapter) else None


class Executor:
    """A running group of ranks."""

    def __init__(self, launcher: RankLauncher, start_timeout: float, step_timeout: float) -> None:
        self._launcher = launcher
        self._start_timeout = start_timeout  # seconds until all ranks must take plans
        self._step_timeout = step_timeout  # seconds until all must have answered one
        self._handles: tuple[RankHandle, ...] = ()
        self._channels: list[Channel] = []
        self._readers: list[asyncio.Task[None]] = []
        self._replies: dict[int, list[tuple[int, StepReply]]] = {}  # by step in flight
        self._awaited = 0  # step
        self._all_here: asyncio.Future[None] | None = None  # who waits for it
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.infos: tuple[RankInfo, ...] = ()
        self.last_step: list[int] = []
        self.num_pages = 0
        self.num_host_pages = 0

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
        self.last_step = [0] * len(self._channels)
        self._readers = [
            asyncio.create_task(self._read(rank, channel))
            for rank, channel in enumerate(self._channels)
        ]

    async def _bring_up(self) -> None:
        self._handles = await self._launcher.launch()
        store = await self._handles[0].rendezvous()
        self.infos = tuple(await asyncio.gather(*(h.load(store) for h in self._handles)))
        # All ranks must agree on the page numbers, so the smallest budget decides.
        self.num_pages = min(info.max_pages for info in self.infos)
        self.num_host_pages = min(info.max_host_pages for info in self.infos)
        addresses = await asyncio.gather(
            *(h.serve(self.num_pages, self.num_host_pages) for h in self._handles)
        )
        for address in addresses:
            self._channels.append(await Channel.connect(address, self._launcher.secret))

    def send(self, frame: bytes) -> None:
        """Send one plan to every rank; `output` waits for what comes of it.

        They may still be at the plan before it.
        """
        for channel in self._channels:
            channel.send(frame)

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
        return self._is_here(step) or self._failure.done()

    async def output(self, step: int) -> StepOutput:
        """Return what rank 0 sampled in a step that was sent, once all ranks have answered.

        Steps are asked for in their order.

        Raises:
            ExecutorFailed: if a rank is gone, reports an error or does not answer in time.
        """
        self._raise_if_failed()
        output: StepOutput | None = None
        try:
            async with asyncio.timeout(self._step_timeout):
                while not self._is_here(step):
                    self._raise_if_failed()
                    await self._wait(step)
        except TimeoutError:
            late = [rank for rank, last in enumerate(self.last_step) if last < step]
            reason = f"rank {late} did not answer step {step} within {self._step_timeout:g} s"
            raise ExecutorFailed(reason, FailureCause.STEP_TIMEOUT) from None
        for rank, reply in self._replies.pop(step):
            output = reply.output if rank == 0 else output
        assert output is not None, f"rank 0 sent no output for step {step}"
        return output

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
            ExecutorFailed: if a rank is gone.
        """
        weights = tuple(weight for _, weight in parts_of(adapter))
        assert len(parts) == len(weights) > 0, f"{len(parts)} parts for {adapter}"
        assert all(len(part) == len(self._handles) for part in parts), "one shard for each rank"
        calls = [
            handle.load_adapter(slot, adapter, weights, shards)
            for handle, shards in zip(self._handles, zip(*parts, strict=True), strict=True)
        ]
        # All are awaited: a late one must not reach a slot that has been given away.
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            unusable = _unusable(error)
            if unusable is not None:
                raise InvalidAdapter(str(unusable)) from error
        for error in errors:
            if not isinstance(error, RayError):
                raise error
            reason = f"a rank failed while it loaded an adapter: {error}"
            failure = ExecutorFailed(reason, FailureCause.ADAPTER_LOAD)
            self._fail(failure)  # it may live on, but what it holds is not known
            raise failure from error
        return tuple(result for result in results if not isinstance(result, BaseException))

    def clear_slots(self, places: Iterable[tuple[int, str]]) -> Awaitable[None]:
        """Free the memory of slots on every rank, of each if it still holds that adapter.

        What is loaded after this call is loaded after the slots are clear, awaited or not. Waiting
        for them raises ExecutorFailed if a rank is gone.
        """
        calls = [h.clear_slot(slot, adapter) for slot, adapter in places for h in self._handles]
        return asyncio.ensure_future(self._await_clear(asyncio.gather(*calls)))

    async def _await_clear(self, calls: Awaitable[list[None]]) -> None:
        try:
            await calls
        except RayError as error:
            reason = f"a rank failed while it cleared a slot: {error}"
            raise ExecutorFailed(reason, FailureCause.SLOT_CLEAR) from error

    async def kill(self) -> None:
        """End all ranks; the group is of no use afterwards."""
        for reader in self._readers:
            reader.cancel()
        for channel in self._channels:
            channel.close()
        if not self._failure.done():
            self._failure.cancel()
        await self._launcher.kill()

    async def _read(self, rank: int, channel: Channel) -> None:
        decoder = msgspec.msgpack.Decoder(StepReply)
        try:
            while True:
                reply = decoder.decode(await channel.receive())
                if reply.error is not None:
                    if reply.error.startswith(_SYMPTOM):
                        await asyncio.sleep(CAUSE_TIMEOUT)
                    is_mismatch = reply.error.startswith(_MISMATCH)
                    cause = FailureCause.PLAN_MISMATCH if is_mismatch else FailureCause.RANK_ERROR
                    reason = f"rank {rank} failed in step {reply.step}: {reply.error}"
                    self._fail(ExecutorFailed(reason, cause))
                    return
                self.last_step[rank] = reply.step
                self._replies.setdefault(reply.step, []).append((rank, reply))
                if self._is_here(self._awaited):
                    self._wake()
        except (ChannelClosed, BadFrame, msgspec.DecodeError) as error:
            self._fail(ExecutorFailed(f"rank {rank} is gone: {error}", FailureCause.RANK_GONE))

    def _is_here(self, step: int) -> bool:
        return len(self._replies.get(step, ())) == len(self._channels)

    async def _wait(self, step: int) -> None:
        """Wait until every rank has answered, the group has failed, or somebody wakes us up."""
        if self._is_here(step) or self._failure.done():
            return
        self._awaited = step
        self._all_here = asyncio.get_running_loop().create_future()
        await self._all_here

    def _wake(self) -> None:
        if self._all_here is not None and not self._all_here.done():
            self._all_here.set_result(None)

    def _fail(self, failure: ExecutorFailed) -> None:
        if not self._failure.done():
            self._failure.set_exception(failure)
            self._failure.exception()  # marks it as seen: nobody may be waiting
            self._wake()

    def _raise_if_failed(self) -> None:
        if self._failure.done():
            self._failure.result()
