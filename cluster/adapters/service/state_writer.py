"""Writes what changes in the pool to its StateFile, beside the event loop.

What changes while one write is under way goes out together with the next. Who answers a call waits
until what the call has changed is on the disk.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cluster.adapters.saved_state import encode
from cluster.adapters.state_file import StateFile
from cluster.errors import Unavailable

logger = logging.getLogger("topwork.pool")

RETRY_SECONDS = 1.0
WRITE_TIMEOUT = 10.0  # seconds that a caller waits for a disk


@dataclass(slots=True)
class _Batch:
    """Entries that are written together."""

    entries: dict[str, None] = field(default_factory=dict)
    done: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class StateWriter:
    """Belongs to an event loop; `value` returns what an entry is now, None if it is to go."""

    def __init__(self, file: StateFile, value: Callable[[str], object]) -> None:
        self._file = file
        self._value = value
        self._next = _Batch()
        self._current: _Batch | None = None
        self._wake = asyncio.Event()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="state")

    def note(self, entry: str) -> None:
        """Have an entry written that has changed."""
        self._next.entries[entry] = None
        self._wake.set()

    async def saved(self, entry: str | None = None) -> None:
        """Wait until all that has changed is on the disk, or one entry.

        Raises:
            Unavailable: with the reason, if it cannot be written.
        """
        for batch in (self._next, self._current):  # the later one, where it is in both
            if batch is not None and (entry in batch.entries or (entry is None and batch.entries)):
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT):
                        await asyncio.shield(batch.done)
                except TimeoutError:
                    raise _unsaved(f"the disk does not answer in {WRITE_TIMEOUT:g} s") from None
                return

    async def run(self) -> None:
        """Write what changes, until cancelled."""
        if self._current is not None:  # an earlier run failed in the middle
            self._keep(self._current, "the write failed")
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._next.entries:
                await self._write()

    async def close(self) -> None:
        """Close the file, once what was begun is written; nobody may be in `run`."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._file.close)
        self._threads.shutdown()

    async def _write(self) -> None:
        batch = self._current = self._next
        self._next = _Batch()
        values = {entry: self._value(entry) for entry in batch.entries}
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, lambda: self._put(values))
        except OSError as error:
            logger.error("the adapter state cannot be written: %s", error)
            self._keep(batch, error.strerror or str(error))
            await asyncio.sleep(RETRY_SECONDS)
        else:
            self._current = None
            batch.done.set_result(None)

    def _put(self, values: dict[str, object]) -> None:
        put = {entry: encode(value) for entry, value in values.items() if value is not None}
        self._file.write(put, [entry for entry, value in values.items() if value is None])

    def _keep(self, batch: _Batch, reason: str) -> None:
        """Write a batch with the next one; who waits for it hears the reason."""
        self._current = None
        self._next.entries = batch.entries | self._next.entries
        self._wake.set()
        batch.done.set_exception(_unsaved(reason))
        batch.done.exception()  # perhaps nobody waits


def _unsaved(reason: str) -> Unavailable:
    return Unavailable(
        f"the change is in force, but it is not saved ({reason}): it is lost if the adapter pool "
        "ends before it can be",
        retry_after=5,
    )
