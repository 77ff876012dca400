"""Keeps one router's ring of API keys in step with their file, and tells metrics of it."""

import time
from collections.abc import Callable
from pathlib import Path

from cluster.router.metrics.request_metrics import RouterMetrics
from cluster.router.tenancy.followed_file import FollowedFile
from cluster.router.tenancy.key_file import KnownKey, parse_keys
from cluster.router.tenancy.key_ring import KeyRing


class KeyWatcher:
    """One router's ring of keys and the file that it is kept in step with."""

    def __init__(
        self, path: Path, metrics: RouterMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        """Read the file.

        Raises:
            OSError, ValueError: if it cannot be used, as `read_keys`.
        """
        self._metrics = metrics
        self._clock = clock
        self._file = FollowedFile(path, "API keys", parse_keys, metrics.key_file_failed)
        self.ring = KeyRing(self._file.entries, clock)
        self._file.note_changes(self._replace)
        metrics.key_file_loaded = clock()

    async def run(self) -> None:
        """Look at intervals until cancelled."""
        await self._file.run()

    async def look(self) -> None:
        """Look at the file, as `FollowedFile.look`."""
        await self._file.look()

    def _replace(self, keys: tuple[KnownKey, ...]) -> None:
        self.ring.replace(keys)
        self._metrics.key_file_loaded = self._clock()
