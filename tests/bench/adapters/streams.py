"""Long answers that are watched while something else happens.

Owns the gaps between tokens and which of them count.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import httpx

from deploy.bench.http_target import BenchError, token_times
from deploy.bench.workload import Ask


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, in seconds of perf_counter."""

    start: float
    stop: float


def gaps_within(times: Sequence[float], window: Window) -> list[float]:
    """Return the times between neighbouring tokens that have a moment in common with a window."""
    return [
        later - earlier
        for earlier, later in zip(times, times[1:], strict=False)
        if later > window.start and earlier < window.stop
    ]


class Streams:
    """Answers that arrive side by side."""

    def __init__(self, num_streams: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(num_streams)]
        self._news = asyncio.Condition()

    async def follow(self, index: int, tokens: AsyncGenerator[float, None]) -> None:
        """Note the tokens of one stream.

        Raises:
            BenchError: if it ends, because a stream must outlast what it is watched for.
        """
        async with aclosing(tokens):
            async for at in tokens:
                self.times[index].append(at)
                async with self._news:
                    self._news.notify_all()
        raise BenchError(f"stream {index} ended after {len(self.times[index])} tokens")

    async def until(self, is_met: Callable[[list[float]], bool]) -> None:
        """Wait until the token times of every stream meet a condition."""
        async with self._news:
            await self._news.wait_for(lambda: all(map(is_met, self.times)))


async def watch(
    client: httpx.AsyncClient,
    asks: Sequence[Ask],
    meanwhile: Callable[[Streams], Awaitable[Window]],
    num_first: int,
) -> list[float]:
    """Return the gaps between tokens while `meanwhile` goes on, of all streams together.

    It begins when every stream has `num_first` tokens, and returns what counts of the time it took.
    Whoever leaves the streams afterwards disconnects, which ends them.

    Raises:
        BenchError: if a stream fails or ends first.
    """
    streams = Streams(len(asks))

    async def look() -> Window:
        await streams.until(lambda times: len(times) >= num_first)
        window = await meanwhile(streams)
        await streams.until(lambda times: times[-1] > window.stop)
        return window

    looking = asyncio.create_task(look())
    following = [
        asyncio.create_task(streams.follow(index, token_times(client, ask)))
        for index, ask in enumerate(asks)
    ]
    try:
        await asyncio.wait((looking, *following), return_when=asyncio.FIRST_COMPLETED)
        for stream in following:
            if stream.done():
                stream.result()  # raises: it has ended too early
        window = await looking
    finally:
        looking.cancel()
        for stream in following:
            stream.cancel()
        await asyncio.gather(looking, *following, return_exceptions=True)
    return [gap for times in streams.times for gap in gaps_within(times, window)]
