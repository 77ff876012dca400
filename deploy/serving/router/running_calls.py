"""The calls that a router runs: a drain waits for their last byte, large ones take much memory.

That memory is given back to the system when none has come for a while. Python's own allocator could
not: it keeps every megabyte in which one small object is left. After 48 bodies of 7 MB, 16 at once,
a router of 224 MB kept 577 MB with it and 235 MB with the C library's, which costs 3 us more for
each token.
"""

import asyncio
import ctypes
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGE_BODY = 2**16  # bytes of a body that takes memory worth giving back: its tokens take more
QUIET = 1.0  # seconds without a large body until memory is given back
RETURNING_ALLOCATOR = {"PYTHONMALLOC": "malloc"}  # the environment of a router


@dataclass
class Calls:
    """The calls that this process answers, and when it gives back the memory that they took."""

    num_running: int = 0
    _trimming: asyncio.TimerHandle | None = field(default=None, repr=False)

    def large_body_ended(self) -> None:
        """Give memory back to the system in a while."""
        if self._trimming is not None:
            self._trimming.cancel()
        loop = asyncio.get_running_loop()
        self._trimming = loop.call_later(QUIET, loop.run_in_executor, None, trim_memory)


CALLS = Calls()


def trim_memory() -> None:
    """Return freed memory to the system: the C library keeps what lies below anything in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


class CountCalls:
    """Middleware that counts the calls that run, and notes which have a large body."""

    def __init__(self, app: ASGIApp, calls: Calls) -> None:
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on; look at its body as it comes."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        num_bytes = 0

        async def receive_and_count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            return message

        self._calls.num_running += 1
        try:
            await self._app(scope, receive_and_count, send)
        finally:
            self._calls.num_running -= 1
            if num_bytes >= LARGE_BODY:
                self._calls.large_body_ended()
