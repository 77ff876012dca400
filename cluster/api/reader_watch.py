"""Ends the stream of a client that takes nothing of what it is sent.

HAProxy sees only who does nothing at all; here those are ended who do next to nothing. What a
router itself takes counts for nothing.
"""

import asyncio
import logging

logger = logging.getLogger("topwork.router")

# Seconds that a stream waits for its client to take a part, at least; at most it is twice as long.
READER_TIMEOUT = 60.0


class ReaderWatch:
    """Ends the stream of a client that takes nothing of it, at a look now and then.

    A timer for each part would cost more than all else that a part costs here.
    """

    def __init__(self, request_id: str) -> None:
        """Begin to look at the stream that the present task sends, until `stop`."""
        self.turn = 0  # to be counted before and after each part: odd while one is sent
        self.has_ended = False
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in one"
        self._task = task
        self._request_id = request_id
        self._look_again()

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(READER_TIMEOUT, self._look, self.turn)

    def _look(self, seen: int) -> None:
        if self.turn != seen or seen % 2 == 0:
            self._look_again()
            return
        logger.warning(
            "request %s: its client has taken nothing for %g s: its stream is ended",
            self._request_id,
            READER_TIMEOUT,
        )
        self.has_ended = True
        self._task.cancel()

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()
