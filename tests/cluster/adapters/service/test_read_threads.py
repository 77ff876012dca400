"""Reads in threads: shared, and apart in time while others are served."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster.adapters.service.read_threads import RateLimiter
from cluster.errors import InvalidAdapter
from tests.cluster.adapters.service.pools import Make, digest_of, spoil, write
from tests.patience import PATIENCE


async def test_concurrent_first_requests_share_one_read_and_its_failure(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = make()
    await actor.start({"law": str(write(tmp_path / "law", 1))})
    reads: list[Any] = []
    whole = actor._threads._reader.whole
    monkeypatch.setattr(
        actor._threads._reader, "whole", lambda s, take: (reads.append(s), whole(s, take))[1]
    )
    spoil(tmp_path / "law")
    failed = await asyncio.gather(
        *(actor.resolve("law", str(n)) for n in range(9)), return_exceptions=True
    )
    assert [type(one) for one in failed] == [InvalidAdapter] * 9
    write(tmp_path / "law", 1)
    resolved = await asyncio.gather(*(actor.resolve("law", str(n)) for n in range(9)))
    assert {one.digest for one in resolved} == {digest_of(tmp_path, 1)}
    assert len(reads) == 2


async def test_a_read_that_hangs_blocks_no_other_adapter(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    actor = make()
    slow = str(write(tmp_path / "slow", 1))
    whole = actor._threads._reader.whole

    def hang(source: Any, take: Any) -> Any:
        if source.path == slow:
            gate.wait(PATIENCE)
        return whole(source, take)

    monkeypatch.setattr(actor._threads._reader, "whole", hang)
    loading = asyncio.create_task(actor.load("slow", slow, False, False))
    fast = str(write(tmp_path / "fast", 2))
    digest = str((await actor.load("fast", fast, False, False)).digest)
    assert len(await actor.shards(digest)) == 1
    await actor.unload("fast", False)
    assert not loading.done()
    gate.set()
    assert (await loading).name == "slow"


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

    async def load(limiter: RateLimiter) -> None:
        await limiter.acquire()
        times.append(round(loop.time(), 6))

    async def all_at_once() -> None:
        limiter = RateLimiter(busy, gap=0.5)
        await asyncio.gather(*(load(limiter) for _ in range(count)))

    try:
        loop.run_until_complete(all_at_once())
    finally:
        loop.close()
    return times


def test_while_sequences_run_one_load_begins_after_each_gap() -> None:
    assert begins(is_busy=True, count=4) == [0.0, 0.5, 1.0, 1.5]


def test_while_nothing_runs_nobody_waits() -> None:
    assert begins(is_busy=False, count=4) == [0.0] * 4
