"""Exceptions that nobody expected: answered with 500, and logged without what they say.

What an exception says may quote a prompt, a key or a tool's arguments, and whoever serves the
application would write it out, traceback and all. So the log gets their kinds and places, and the
exception ends here.
"""

import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("topwork.router")

MAX_FRAMES = 12  # the innermost ones
_ROOT = Path(__file__).parents[3]


class AnswerBrokenOff(RuntimeError):
    """Tells the server to close a connection on which an answer has begun."""


class CatchUnexpected:
    """Stands around the routes, inside of all that looks at responses."""

    def __init__(self, app: ASGIApp, respond: Callable[[Request, Exception], Response]) -> None:
        self._app = app
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; answer for it if it fails.

        Raises:
            AnswerBrokenOff: if it fails behind the beginning of its answer.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:  # the border: what comes through here is a bug
            request_id = scope["state"]["request_id"]
            logger.error("request %s failed: %s", request_id, "; caused by ".join(_told(error)))
            if has_begun:
                raise AnswerBrokenOff(f"see the log of request {request_id}") from None
            await self._respond(Request(scope), error)(scope, receive, send)


def _told(error: BaseException | None) -> Iterator[str]:
    """Yield the kind and the place of an exception, and of those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
        places = " > ".join(f"{_shortened(one.filename)}:{one.lineno} {one.name}" for one in frames)
        yield f"{type(error).__name__} at {places}"
        error = error.__cause__ or error.__context__


def _shortened(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else "/".join(path.parts[-2:])
