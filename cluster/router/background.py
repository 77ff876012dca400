"""Calls that are read on although their client has gone: until they end, or another router reads.

A scheduler carries such a call to its end by itself. What a router adds while it reads it: its
tokens are counted for its tenant and its limits, and if that scheduler is lost, the call goes on in
another one.
"""

import asyncio

from cluster.errors import Conflict, TopworkError
from cluster.router.generation import Generation


class BackgroundCalls:
    """The calls that one router reads without a client; belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def read_on(self, generation: Generation) -> None:
        """Read a call, which has been entered, to its end, and leave it."""
        if self._is_closed:
            generation.leave(asyncio.CancelledError(), for_good=True)
            return
        task = asyncio.create_task(_read(generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Leave all calls to their schedulers."""
        self._is_closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(generation: Generation) -> None:
    cause: BaseException | None = None
    try:
        while generation.is_running:
            await generation.receive()
    except Conflict:
        pass  # somebody else reads it now
    except TopworkError as error:
        cause = error
    except asyncio.CancelledError as error:
        cause = error
        raise
    finally:
        generation.leave(cause, for_good=True)
