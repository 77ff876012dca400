"""Content of adapters, from host memory or disk, as shards in shared memory, one for each rank.

The builder finds what an adapter that was read takes, in host memory and on the device, and refuses
one that no device could hold. It blocks, so call it in a thread; several threads may. The store
takes content that has been read before from host memory, or has it read from disk once more; the
directories are tried in the order that the catalogue names them in.
"""

from collections.abc import Callable
from typing import Any

from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from cluster.adapters.adapter import Adapter
from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.host_cache import Shards
from cluster.adapters.loaded_adapters import LoadedAdapter
from cluster.adapters.peft.checks import PARAM
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.records import Facts, Outline, Source
from cluster.adapters.service.read_threads import ReadThreads
from cluster.adapters.sharding import RankMemory, cut
from cluster.adapters.versions import Version
from cluster.errors import Conflict, InvalidAdapter, NotFound, TopworkError, Unavailable
from worker.lora.memory import claimed_bytes
from worker.model_config import ModelConfig
from worker.weights.partition import Partition, partitions

STORE_RETRY_SECONDS = 5


class ShardBuilder:
    """Cuts adapters for one kind of group; `put` takes a shard to shared memory.

    `put` returns a handle; the memory is freed when the last copy of the handle is gone. `layout`
    names all that decides how an adapter is cut.
    """

    def __init__(self, memory: RankMemory, put: Callable[[Any], Any], layout: str = "") -> None:
        self._memory = memory
        self._put = put
        self._layout = layout
        self._ranks: tuple[ModelConfig, tuple[Partition, ...]] | None = None

    def _parts(self, model: ModelConfig) -> tuple[Partition, ...]:
        """Return what each rank holds of a model; all adapters are of the same one."""
        if self._ranks is None or self._ranks[0] is not model:
            memory = self._memory
            self._ranks = model, partitions(model, memory.tp, has_exact_sums=memory.has_exact_sums)
        return self._ranks[1]

    def load(self, outline: Outline, adapter: Adapter) -> LoadedAdapter:
        """Cut an adapter.

        Raises:
            InvalidAdapter: if it takes more than the device memory of all adapters together.
            Unavailable: if there is no room for its shards.
        """
        memory, parts = self._memory, self._parts(adapter.model)
        shards = tuple(cut(adapter, part) for part in parts)
        claims = [
            claimed_bytes(shard, part, memory.adapter_item_bytes, memory.model_item_bytes)
            for shard, part in zip(shards, parts, strict=True)
        ]
        device_bytes = max(claims)
        if memory.adapter_bytes is not None and device_bytes > memory.adapter_bytes:
            raise InvalidAdapter(
                f"adapter {adapter.path}: it takes {device_bytes} bytes on a rank, and all "
                f"adapters together have {memory.adapter_bytes} (adapter_memory)",
                PARAM,
            )
        try:
            handles = tuple(self._put(shard) for shard in shards)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise Unavailable(
                f"no room for the shards of an adapter: {type(error).__name__}",
                retry_after=STORE_RETRY_SECONDS,
            ) from error
        facts = Facts(
            digest=adapter.digest,
            outline=outline,
            host_bytes=sum(shard.data.nbytes for shard in shards),
            device_bytes=device_bytes,
            stands_alone=adapter.score is not None
            or any(module.magnitude is not None for module in adapter.modules),
            layout=self._layout,
        )
        return LoadedAdapter(facts, handles)


class AdapterStore:
    """All content of the catalogue, in memory or on disk."""

    def __init__(self, catalog: AdapterCatalog, threads: ReadThreads) -> None:
        self._catalog = catalog
        self._threads = threads
        self._expected: set[str] = set()

    def expect(self, path: str) -> None:
        """Let a directory that is missing count as not there yet, until it has been read once."""
        self._expected.add(path)

    async def read(self, version: Version) -> None:
        """Read a version, so that the catalogue has its digest, and its sizes as of now.

        Raises:
            NotFound: if its directory is gone, or what it was has been unloaded meanwhile.
            InvalidAdapter: if its directory holds something else, or cannot be read.
            Unavailable: if its directory is not there yet.
        """
        if version.digest is not None:
            await self.take(version.digest)
            return
        source = version.outline.source
        try:
            loaded = await self._read_directory(source)
        except NotFound as error:
            raise self._explained(source, error) from error
        self._catalog.complete(loaded)

    async def take(self, digest: str) -> Shards:
        """Return content, as the one used last.

        Raises:
            NotFound: if it is not known any more, or its directory is gone.
            InvalidAdapter: if its directory holds something else, or cannot be read.
            Unavailable: if its directory is not there yet.
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
            await self.read(version)
            return
        one = await self._read_again(version.digest)
        if one is not None:
            loaded[version.digest] = one

    async def _read_again(self, digest: str) -> LoadedAdapter | None:
        """Read content from disk; None if another call has brought it to memory."""
        problem: TopworkError | None = None
        for source in self._catalog.missing(digest):
            try:
                loaded = await self._read_directory(source)
            except (NotFound, InvalidAdapter) as error:
                problem = problem or self._explained(source, error)
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

    async def _read_directory(self, source: Source) -> LoadedAdapter:
        """Read a directory, together with all who want it now."""
        loaded = await self._threads.shared(source)
        self._expected.discard(source.path)
        return loaded

    def _explained(self, source: Source, error: TopworkError) -> TopworkError:
        """Return what to tell: a directory that was there before this process may come back."""
        if not isinstance(error, NotFound) or source.path not in self._expected:
            return error
        return Unavailable(
            f"{error.message}; the adapter was there before the adapter pool restarted. Bring the "
            "directory back, or unload the adapter",
            retry_after=STORE_RETRY_SECONDS,
        )
