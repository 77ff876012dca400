"""Follows the file of API keys: a changed file counts within seconds, without a restart.

Owns when it is read and what a broken one does: the keys that were read before stay, an error is
logged, and metrics tell of it until the file can be used again.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from cluster.router.metrics.request_metrics import RouterMetrics
from cluster.router.tenancy.key_file import parse_keys, read_file
from cluster.router.tenancy.key_ring import KeyRing

logger = logging.getLogger("topwork.router")

INTERVAL = 1.0  # seconds between two looks; a change counts at the second look that sees it


class KeyWatcher:
    """One router's ring of keys and the file that it is kept in step with.

    The whole file is compared, as it is small: the times of a file say too little of one that was
    written twice at once, or lies on a network. Kubernetes replaces a Secret by a link to another
    directory, which is met by opening the path anew each time.
    """

    def __init__(
        self, path: Path, metrics: RouterMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        """Read the file.

        Raises:
            OSError, ValueError: if it cannot be used, as `read_keys`.
        """
        self._path = path
        self._metrics = metrics
        self._clock = clock
        self._taken = read_file(path)
        self._seen = self._taken  # at the last look
        self._broken: bytes | None = None  # what was found to be of no use
        self._fault = ""  # that stands
        self.ring = KeyRing(parse_keys(self._taken, path), clock)
        metrics.key_file_loaded = clock()

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
            keys = await asyncio.to_thread(parse_keys, data, self._path)
        except ValueError as error:
            self._broken = data
            self._failed(" ".join(str(error).split()))
            return
        self.ring.replace(keys)
        self._taken, self._broken = data, None
        self._metrics.key_file_loaded = self._clock()
        logger.warning("%d API keys were read anew from %s", len(keys), self._path)
        self._fault = ""

    def _failed(self, fault: str) -> None:
        self._metrics.key_file_failed()
        if fault != self._fault:
            logger.error("API keys: %s; those that were read before stay", fault)
        self._fault = fault

    def _mended(self) -> None:
        self._broken = None
        if self._fault:
            logger.warning("%s holds the API keys that count again", self._path)
        self._fault = ""
