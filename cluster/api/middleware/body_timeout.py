"""Bounds how long a client may take to send a body.

HAProxy sees only who does nothing at all; here those are ended who do next to nothing. What a
router itself takes counts for nothing.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import RequestTimeout

MIN_RATE = 4096  # bytes a second, on average over each time-out but the one in which a body ends


class BodyTimeout:
    """Middleware that ends a request whose body has not come in time, with 408.

    Whoever reads the body gets the error: routes do, inside of what makes responses of errors.
    """

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        """Take note of the limit.

        Args:
            app: what reads the body.
            seconds: that a body may be waited for, or each further `MIN_RATE * seconds` of it.
        """
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a body that comes in time."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._app(scope, TimedBody(receive, self._seconds), send)


class TimedBody:
    """What a route receives: the parts of a body in time, then whatever else there is."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._left = seconds  # of waiting, until enough must have come
        self._bytes = 0  # that have come meanwhile
        self._is_complete = False

    async def __call__(self) -> Message:
        """Return the next message.

        Raises:
            RequestTimeout: if a part of the body has not come in time.
        """
        while not self._is_complete:
            try:
                return await self._next_part()
            except TimeoutError:
                if self._bytes < MIN_RATE * self._seconds:
                    raise RequestTimeout(
                        f"the body has not come within {self._seconds:g} s, and less than "
                        f"{MIN_RATE} bytes of it a second"
                    ) from None
                self._left, self._bytes = self._seconds, 0
        return await self._receive()

    async def _next_part(self) -> Message:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(self._left):
            message = await self._receive()
        self._left -= loop.time() - began
        self._bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        return message
