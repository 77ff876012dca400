"""Names that are taken out of the catalogue: waited for until all that only they stood for is gone.

Owns which names are on their way out, and with what content, so that a later call can hurry an
earlier one. What content is due to go is the pool's to say, and how it goes the reclaimer's.
"""

from collections.abc import Callable

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.records import UnloadResult
from cluster.adapters.service.directory_watcher import DirectoryWatcher
from cluster.adapters.service.garbage_collector import AdapterGC


class AdapterUnloads:
    """Unloads under way; `tell_pins` says what is still pinned to whoever must know."""

    def __init__(
        self,
        pool: AdapterCatalog,
        watch: DirectoryWatcher,
        reclaimer: AdapterGC,
        tell_pins: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._watch = watch
        self._reclaimer = reclaimer
        self._tell_pins = tell_pins
        self._draining: dict[str, tuple[str, ...]] = {}  # digests that go with a name

    async def unload(self, name: str, *, force: bool) -> UnloadResult:
        """Take a name out and wait; see `AdapterPoolActor.unload`.

        Raises:
            NotFound: if there is no such name.
        """
        if force and name not in self._pool and name in self._draining:
            freed = await self._reclaimer.freed(self._draining[name], force=True)
            return UnloadResult(name, (), freed, ())
        history = self._pool.unload(name)
        self._watch.dismiss(name)
        is_retired = {d: self._pool.retirement(d) is not None for d in sorted(history.digests)}
        leaving = tuple(digest for digest, retired in is_retired.items() if retired)
        self._draining[name] = leaving
        try:
            self._tell_pins()
            freed = await self._reclaimer.freed(leaving, force=force)
        finally:
            if self._draining.get(name) is leaving:
                del self._draining[name]
        return UnloadResult(
            name=name,
            versions=tuple(version.number for version in history.versions),
            freed=freed,
            shared=tuple(digest for digest, retired in is_retired.items() if not retired),
        )
