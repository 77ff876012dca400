"""Background tasks that must not end: one that does is logged, counted and begun again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger("topwork.supervision")

RESTART_DELAY = 1.0  # seconds


async def supervise(
    name: str, make: Callable[[], Awaitable[None]], on_failure: Callable[[str], None]
) -> None:
    """Run what `make` returns, and again whenever it ends, until cancelled.

    `on_failure` is called with the name each time, to count it.
    """
    task = asyncio.current_task()
    assert task is not None, "coroutines run in tasks"
    while True:
        try:
            await make()
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            logger.exception("the background task %r was cancelled by its own work", name)
        except Exception:
            logger.exception("the background task %r failed", name)
        else:
            logger.error("the background task %r ended, which it must not", name)
        on_failure(name)
        await asyncio.sleep(RESTART_DELAY)
