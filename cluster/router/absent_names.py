"""Whether there is an adapter of a name, asked once for all who want to know at the same time.

Calls with names that nobody has loaded cost the adapter pool nothing that grows with them: a router
has one question about such names on its way, with all names that calls have brought meanwhile, and
asks for the rest only what it has found before. An answer is never older than the call that it is
for, so that what has just been loaded is found, through whichever router it was.
"""

import asyncio
from collections.abc import Awaitable, Callable

from cluster.errors import Overloaded

MAX_NAME = 256  # characters; no adapter has a longer name
MAX_ASKED = 1024  # names in one question
MAX_FOUND = 65_536  # names of adapters that are taken to be there still

Ask = Callable[[tuple[str, ...]], Awaitable[frozenset[str]]]


class AbsentNames:
    """What a router knows of names; `ask` tells which of some stand for nothing."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._found: dict[str, None] = {}  # the one found last behind
        self._waiting: dict[str, asyncio.Future[bool]] = {}  # for the next question
        self._asking: asyncio.Task[None] | None = None

    async def is_absent(self, name: str) -> bool:
        """Return whether no adapter has a name; one that was found lately is not asked for.

        Raises:
            Overloaded: if too many names are being asked for.
            TopworkError: as `ask` does.
        """
        if len(name) > MAX_NAME:
            return True
        if name in self._found:
            return False
        answer = self._waiting.get(name)
        if answer is None:
            if len(self._waiting) >= MAX_ASKED:
                raise Overloaded(
                    f"{MAX_ASKED} names of models that are not known here are being looked up",
                    retry_after=1,
                )
            answer = self._waiting[name] = asyncio.get_running_loop().create_future()
            # All who wait may go before it is answered.
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._asking is None:
            self._asking = asyncio.create_task(self._run())
        return await asyncio.shield(answer)  # it is the others', too

    def found(self, name: str) -> None:
        """Note that there is an adapter of a name."""
        self._found.pop(name, None)
        self._found[name] = None
        if len(self._found) > MAX_FOUND:
            del self._found[next(iter(self._found))]

    def lost(self, name: str) -> None:
        """Note that there is none any more."""
        self._found.pop(name, None)

    async def _run(self) -> None:
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, {}
                await self._answer(asked)
        finally:
            self._asking = None

    async def _answer(self, asked: dict[str, asyncio.Future[bool]]) -> None:
        try:
            absent = await self._ask(tuple(asked))
        except BaseException as error:
            for answer in asked.values():
                if isinstance(error, asyncio.CancelledError):
                    answer.cancel()
                else:
                    answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for name, answer in asked.items():
            answer.set_result(name in absent)
