"""Follows a file of the operator: a changed one counts within seconds, without a restart.

Owns when it is read and what a broken one does: what was read before stays, an error is logged, and
`on_failure` is called at each look until the file can be used again.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from cluster.router.tenancy.yaml_list import read_file

logger = logging.getLogger("topwork.router")

INTERVAL = 1.0  # seconds between two looks; a change counts at the second look that sees it

Entries = TypeVar("Entries", bound=tuple[Any, ...])


class FollowedFile(Generic[Entries]):
    """One file, and what was read from it last.

    The whole file is compared, as it is small: the times of a file say too little of one that was
    written twice at once, or lies on a network. Kubernetes replaces a Secret by a link to another
    directory, which is met by opening the path anew each time.
    """

    def __init__(
        self,
        path: Path,
        noun: str,
        parse: Callable[[bytes, Path], Entries],
        on_failure: Callable[[], None],
    ) -> None:
        """Read the file; `noun` is what the log calls its entries.

        Raises:
            OSError, ValueError: if it cannot be used.
        """
        self._path = path
        self._noun = noun
        self._parse = parse
        self._on_failure = on_failure
        self._on_change: Callable[[Entries], None] = lambda entries: None
        self._taken = read_file(path)
        self._seen = self._taken  # at the last look
        self._broken: bytes | None = None  # what was found to be of no use
        self._fault = ""  # that stands
        self.entries = parse(self._taken, path)

    def note_changes(self, on_change: Callable[[Entries], None]) -> None:
        """Have `on_change` called with what is read from now on."""
        self._on_change = on_change

    async def run(self) -> None:
        """Look at intervals until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.look()

    async def look(self) -> None:
        """Take in a file that has changed since it was taken, and has not since the last look.

        One that is still being written is different at each look, or soon will be.
        """
        try:
            data = await asyncio.to_thread(read_file, self._path)
            has_settled, self._seen = data == self._seen, data
            if data == self._broken:
                self._failed(self._fault)
            elif data == self._taken:
                self._mended()
            elif has_settled:
                await self._take(data)
        except (OSError, ValueError) as error:  # it is away, or too large
            self._failed(str(error))

    async def _take(self, data: bytes) -> None:
        try:
            entries = await asyncio.to_thread(self._parse, data, self._path)
        except ValueError as error:
            self._broken = data
            self._failed(" ".join(str(error).split()))
            return
        self.entries = entries
        self._on_change(entries)
        self._taken, self._broken = data, None
        logger.warning("%d %s were read anew from %s", len(entries), self._noun, self._path)
        self._fault = ""

    def _failed(self, fault: str) -> None:
        self._on_failure()
        if fault != self._fault:
            logger.error("%s: %s; those that were read before stay", self._noun, fault)
        self._fault = fault

    def _mended(self) -> None:
        self._broken = None
        if self._fault:
            logger.warning("%s holds the %s that count again", self._path, self._noun)
        self._fault = ""
