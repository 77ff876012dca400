"""What one router sees of calls that several schedulers keep."""

from collections.abc import Iterable
from typing import Any, cast

import pytest

from cluster.errors import Unavailable
from cluster.messages import Claimed
from cluster.request import BASE, FinishReason, Request, TokenEvent
from cluster.router.kept_calls import KeptCalls
from cluster.router.replica_set import ReplicaSet
from worker.protocol import SamplingParams

REQUEST = Request("r", BASE, (1,), SamplingParams(), max_tokens=9)
NOTHING = Claimed(1, "")


def has(num_tokens: int, end: FinishReason | None = None) -> Claimed:
    event = TokenEvent("r", tuple(range(num_tokens)), finish_reason=end)
    return Claimed(1, "", b"", (REQUEST,), ((event,),))


class Scheduler:
    """The router's end of a connection to one that has this of a call, or does not answer."""

    def __init__(self, answer: Claimed | None) -> None:
        self._answer = answer
        self.released: list[list[str]] = []

    async def look(self, stream_id: str) -> Claimed:
        if self._answer is None:
            raise Unavailable("it is gone")
        return self._answer

    async def end_kept(self, stream_id: str, *, forgets: bool) -> Claimed:
        return await self.look(stream_id)

    async def claim(self, stream_id: str, prefix: str, queue: Any) -> Claimed:
        return await self.look(stream_id)

    def detach(self, stream_id: str, names: Iterable[str], told: tuple[int, ...]) -> None:
        self.released.append(list(names))


class Replicas:
    def __init__(self, clients: list[Scheduler]) -> None:
        self.clients = clients


def calls_of(*answers: Claimed | None) -> tuple[KeptCalls, list[Scheduler]]:
    schedulers = [Scheduler(answer) for answer in answers]
    replicas = cast(ReplicaSet, Replicas(schedulers))
    return KeptCalls(replicas, 1.0, lambda name: name), schedulers


@pytest.mark.parametrize(
    ("answers", "best"),
    [
        ((has(2), has(3)), 1),
        ((has(3), has(2)), 0),
        ((has(3, "abort"), has(2)), 1),  # it went on elsewhere
        ((has(3, "error"), has(3)), 1),
        ((has(2, "abort"), has(3, "abort")), 1),
        ((has(3, "length"), has(3)), 0),
        ((NOTHING, has(0)), 1),
        ((None, has(1), NOTHING), 1),
    ],
)
async def test_the_copy_counts_that_has_not_broken_off_and_has_most(
    answers: tuple[Claimed | None, ...], best: int
) -> None:
    calls, schedulers = calls_of(*answers)
    assert await calls.look("a") == answers[best]
    assert await calls.end("a", forgets=True) == answers[best]
    claimed = await calls.claim("a")
    assert claimed is not None
    assert claimed.claimed == answers[best]
    for scheduler, answer in zip(schedulers, answers, strict=True):
        is_other = answer not in (None, NOTHING, answers[best])
        assert bool(scheduler.released) == is_other


async def test_a_call_that_nobody_has_is_not_there_but_one_who_is_silent_may_have_it() -> None:
    calls, _ = calls_of(NOTHING, NOTHING)
    assert await calls.look("a") is None
    assert await calls.claim("a") is None
    for answers in ((NOTHING, None), ()):
        calls, _ = calls_of(*answers)
        with pytest.raises(Unavailable):
            await calls.look("a")
