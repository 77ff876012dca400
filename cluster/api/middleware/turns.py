"""Calls begin one at a time: one in each turn of the event loop.

All calls that come at once would else be begun, a millisecond or so for each, before the loop
looked again at the tokens of running streams. Once a call has begun, nothing holds it.
"""

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send


class TakeTurns:
    """Middleware that lets a call pass in the turn of the loop that is its own, first come first.

    A call that comes alone passes at once.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # this turn of the loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on when its turn has come."""
        if scope["type"] == "http":
            loop = asyncio.get_running_loop()
            if self._is_taken:
                turn = loop.create_future()
                self._waiting.append(turn)
                await turn
            else:
                self._is_taken = True
                loop.call_soon(self._end_turn)
        await self._app(scope, receive, send)

    def _end_turn(self) -> None:
        """Give the next turn to who waits for it and has not been cancelled."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._end_turn)
                return
        self._is_taken = False
