"""Content that has been read before: taken from host memory, or read from disk once more.

The directories are tried in the order that the catalogue names them in.
"""

from collections.abc import Callable

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.contents import LoadedAdapter
from cluster.adapters.host_cache import Shards
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.service.read_threads import ReadThreads
from cluster.adapters.versions import Version
from cluster.errors import Conflict, InvalidAdapter, NotFound, TopworkError


class AdapterStore:
    """All content of the catalogue, in memory or on disk."""

    def __init__(self, catalog: AdapterCatalog, threads: ReadThreads) -> None:
        self._catalog = catalog
        self._threads = threads

    async def take(self, digest: str) -> Shards:
        """Return content, as the one used last.

        Raises:
            NotFound: if it is not known any more, or its directory is gone.
            InvalidAdapter: if its directory holds something else, or cannot be read.
        """
        while self._catalog.missing(digest):
            loaded = await self._read_again(digest)
            if loaded is not None:
                self._catalog.restore(loaded)
        # No await before this: another load could evict what was just brought back.
        return self._catalog.take(digest)

    async def obtain(
        self, name: str, targets: Callable[[], tuple[Version, ...]]
    ) -> dict[str, LoadedAdapter]:
        """Make sure that the content of a name's versions can be had; return what had to be read.

        Raises:
            Conflict: with the reason, if it cannot.
        """
        loaded: dict[str, LoadedAdapter] = {}
        while True:
            absent = [
                version
                for version in targets()
                if version.digest is None
                or (version.digest not in loaded and self._catalog.missing(version.digest))
            ]
            if not absent:
                return loaded
            try:
                await self._read_version(absent[0], loaded)
            except (NotFound, InvalidAdapter) as error:
                raise Conflict(
                    f"version {absent[0].number} of {shown(name)} cannot be had: {error}", "version"
                ) from error

    async def _read_version(self, version: Version, loaded: dict[str, LoadedAdapter]) -> None:
        if version.digest is None:
            self._catalog.complete(await self._threads.shared(version.outline.source))
            return
        one = await self._read_again(version.digest)
        if one is not None:
            loaded[version.digest] = one

    async def _read_again(self, digest: str) -> LoadedAdapter | None:
        """Read content from disk; None if another call has brought it to memory."""
        problem: TopworkError | None = None
        for source in self._catalog.missing(digest):
            try:
                loaded = await self._threads.shared(source)
            except (NotFound, InvalidAdapter) as error:
                problem = problem or error
                continue
            if loaded.facts.digest == digest:
                return loaded
            problem = problem or InvalidAdapter(
                f"adapter directory {source.path} has changed on disk since it was loaded; "
                "load it again with load_inplace"
            )
        if problem is not None:
            raise problem
        return None
