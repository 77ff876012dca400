"""Content that has been read before: taken from host memory, or read from disk once more.

Owns the order in which directories are tried and what is said when none has it. Which content
there is, and where, is the pool's to say.
"""

from collections.abc import Callable

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.contents import Loaded
from cluster.adapters.host_cache import Shards
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.service.read_threads import ReadThreads
from cluster.adapters.versions import Version
from cluster.errors import Conflict, InvalidAdapter, NotFound, TopworkError


class AdapterStore:
    """The pool's content, wherever it is."""

    def __init__(self, pool: AdapterCatalog, reads: ReadThreads) -> None:
        self._pool = pool
        self._reads = reads

    async def take(self, digest: str) -> Shards:
        """Return content, as the one used last.

        Raises:
            NotFound: if it is not known any more, or its directory is gone.
            InvalidAdapter: if its directory holds something else, or cannot be read.
        """
        while self._pool.missing(digest):
            loaded = await self._read_again(digest)
            if loaded is not None:
                self._pool.restore(loaded)
        # No await before this: another load could evict what was just brought back.
        return self._pool.take(digest)

    async def obtain(
        self, name: str, targets: Callable[[], tuple[Version, ...]]
    ) -> dict[str, Loaded]:
        """Make sure that the content of a name's versions can be had; return what had to be read.

        Raises:
            Conflict: with the reason, if it cannot.
        """
        loaded: dict[str, Loaded] = {}
        while True:
            absent = [
                version
                for version in targets()
                if version.digest is None
                or (version.digest not in loaded and self._pool.missing(version.digest))
            ]
            if not absent:
                return loaded
            try:
                await self._read_version(absent[0], loaded)
            except (NotFound, InvalidAdapter) as error:
                raise Conflict(
                    f"version {absent[0].number} of {shown(name)} cannot be had: {error}", "version"
                ) from error

    async def _read_version(self, version: Version, loaded: dict[str, Loaded]) -> None:
        if version.digest is None:
            self._pool.settle(await self._reads.shared(version.outline.source))
            return
        one = await self._read_again(version.digest)
        if one is not None:
            loaded[version.digest] = one

    async def _read_again(self, digest: str) -> Loaded | None:
        """Read content from disk; None if somebody else has brought it to memory."""
        problem: TopworkError | None = None
        for source in self._pool.missing(digest):
            try:
                loaded = await self._reads.shared(source)
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
