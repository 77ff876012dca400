"""Loads that nobody waits for keep apart while others are served, and only then."""

import asyncio

from cluster.adapters.service.rate_limiter import RateLimiter
from cluster.adapters.service.scheduler_links import SchedulerLinks
from tests.cluster.adapters.service.replicas import Replica, connector


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when everybody sleeps."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:  # as asyncio's own, but without waiting for real
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def begins(*, is_busy: bool, count: int) -> list[float]:
    """Return when each of some loads that come at once begins."""
    loop = Clock()
    times: list[float] = []

    async def busy() -> bool:
        return is_busy

    async def load(pace: RateLimiter) -> None:
        await pace.take()
        times.append(round(loop.time(), 6))

    async def all_at_once() -> None:
        pace = RateLimiter(busy, gap=0.5)
        await asyncio.gather(*(load(pace) for _ in range(count)))

    try:
        loop.run_until_complete(all_at_once())
    finally:
        loop.close()
    return times


def test_while_sequences_run_one_load_begins_after_each_gap() -> None:
    assert begins(is_busy=True, count=4) == [0.0, 0.5, 1.0, 1.5]


def test_while_nothing_runs_nobody_waits() -> None:
    assert begins(is_busy=False, count=4) == [0.0] * 4


async def test_a_replica_that_serves_or_does_not_answer_is_busy() -> None:
    replica = Replica()
    links = SchedulerLinks(connector(replica), silence=5)
    assert not await links.is_busy()
    await links.attach(replica.address)
    assert not await links.is_busy()
    replica.lease("a")
    assert await links.is_busy()
    replica.release("a")
    assert not await links.is_busy()
    replica.is_hung = True
    assert await links.is_busy()
    links.close()
