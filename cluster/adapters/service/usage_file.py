"""The file of what tenants have used: a line of JSON for each tenant and day.

Written by the adapter pool, to which all routers report. The lines of the day that is not over are
written anew as its sums grow; those of earlier days stay as they are. FILE.state beside it holds
what must not be counted twice, and is the truth of the two: the lines come out of it.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from cluster.errors import Unavailable
from cluster.metrics_hub import RouterCounts
from cluster.supervision import supervise
from cluster.tenancy.usage_book import SavedUsage, UsageBook

logger = logging.getLogger("topwork.pool")

INTERVAL = 10.0  # seconds between two writes
TASK = "usage"


class UsageFile:
    """Belongs to an event loop; `today` returns the day, as 2026-11-24."""

    def __init__(
        self, path: str | None, today: Callable[[], str], on_failure: Callable[[str], None]
    ) -> None:
        self._path = None if path is None else Path(path)  # None: nothing is written
        self._today = today
        self._on_failure = on_failure
        self._book: UsageBook | None = None
        self._offset = 0  # where the day begins
        self._ended = b""  # the lines before it that are not written yet
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read what was saved, once.

        Raises:
            Unavailable: with the reason, if a file cannot be used.
        """
        if self._path is None or self._book is not None:
            return
        try:
            saved, size = await asyncio.to_thread(_read, self._path)
        except (OSError, msgspec.MsgspecError) as error:
            raise Unavailable(f"the usage file {self._path} cannot be used: {error}") from error
        if saved is None and size:
            logger.error(
                "%s has no state: what routers have counted so far is taken as booked", self._path
            )
        self._offset = size if saved is None else saved.offset
        self._book = UsageBook(saved, is_baseline=saved is None and size > 0)
        self._task = asyncio.create_task(supervise(TASK, self._run, self._on_failure))

    def take_in(self, counts: RouterCounts) -> None:
        """Add what a router reports."""
        if self._book is None:
            return
        today = self._today()
        if today != self._book.day:
            lines = self._book.lines()
            self._ended += lines
            self._offset += len(lines)
            self._book.turn_to(today)
        self._book.take_in(counts.router, counts.usage, today, has_begun_now=counts.number == 1)

    async def save(self) -> None:
        """Write what is new.

        Raises:
            OSError: if it cannot be written.
        """
        if self._path is None or self._book is None or not self._book.has_news:
            return
        self._book.has_news = False
        ended, self._ended = self._ended, b""
        begin = self._offset - len(ended)
        lines, state = ended + self._book.lines(), self._book.saved(self._offset)
        try:
            await asyncio.to_thread(_write, self._path, begin, lines, state)
        except OSError:
            self._book.has_news, self._ended = True, ended + self._ended
            raise

    async def close(self) -> None:
        """Write what is new, for the last time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            await self.save()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            await self.save()


def _state_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.state")


def _read(path: Path) -> tuple[SavedUsage | None, int]:
    """Return (what was saved, bytes of the file, which is there afterwards)."""
    path.touch(mode=0o640)
    state = _state_of(path)
    saved = None
    if state.exists():
        saved = msgspec.json.decode(state.read_bytes(), type=SavedUsage)
    return saved, path.stat().st_size


def _write(path: Path, begin: int, lines: bytes, state: SavedUsage) -> None:
    """Write the lines, then the state: what a crash leaves out between the two is counted anew."""
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(lines)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    new = _state_of(path).with_name(f"{path.name}.state.new")
    with new.open("wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        os.fsync(file.fileno())
    new.replace(_state_of(path))
