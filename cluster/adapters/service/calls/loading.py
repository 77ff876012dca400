"""What calls load: directories, uploads, tensors in a file, and what lies on hubs and in buckets.

Whatever the source, an adapter is whole on this host's disk and checked, and its shards are cut for
all ranks, before its name is switched to it; if anything of that fails, the name stays as it was.
"""

from pathlib import Path

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.peft.files import copy_regular_file, narrowed
from cluster.adapters.records import AdapterRecord, LoadOptions, Source
from cluster.adapters.service.calls.in_flight import InFlightCalls, pool_call, pool_query
from cluster.adapters.service.directory_watcher import NameLocks
from cluster.adapters.service.pool_config import AdapterPoolConfig
from cluster.adapters.service.pool_state import PoolState
from cluster.adapters.service.read_threads import RateLimiter, ReadThreads
from cluster.adapters.sources.fetcher import Fetcher
from cluster.adapters.sources.staged import StagedAdapters
from cluster.adapters.sources.staging import Incoming
from cluster.adapters.sources.uploads import Uploads
from cluster.errors import InvalidRequest
from cluster.tenancy.owners import Caller

SHARED_MEMORY = "/dev/shm"


class LoadingCalls:
    """Methods of the pool's actor."""

    _config: AdapterPoolConfig
    _calls: InFlightCalls
    _catalog: AdapterCatalog
    _fetcher: Fetcher
    _locks: NameLocks
    _rate_limiter: RateLimiter
    _roots: tuple[str, ...]
    _staged: StagedAdapters
    _state: PoolState
    _threads: ReadThreads
    _uploads: Uploads

    @pool_call
    async def load(
        self,
        name: str,
        path: str,
        load_inplace: bool,
        pinned: bool,
        sha256: str | None = None,
        root: str | None = None,
        caller: Caller | None = None,
    ) -> AdapterRecord:
        """Read an adapter whole and publish it under a name.

        `path` is a directory on this host, or where adapter_sources lets the pool fetch it from;
        `sha256` is what the weights that are fetched must have. With `root` nothing outside of that
        directory of this host is read, and nothing is fetched. `caller` is whose it will be.

        Raises:
            Forbidden: if the caller may hold no more.
            InvalidRequest: if the name cannot be taken, no more can be pinned, or nothing may be
                fetched from there.
            NotFound: if there is no such directory, repository or file.
            InvalidAdapter: if the adapter fails a check or lies outside of adapter_roots or `root`.
            Overloaded: if too many are being fetched.
            Unavailable: if it cannot be fetched, or what has changed cannot be saved, as for all
                calls that change something.
        """
        options = LoadOptions(load_inplace, pinned, sha256, caller=caller)
        address = None if root is not None else self._fetcher.address(path)
        if address is not None:
            self._catalog.check_name(name, load_inplace=load_inplace)
            self._catalog.check_room(name, caller, pinned=pinned)
            async with self._fetcher.fetched(address, sha256) as incoming:
                return await self._publish_incoming(name, incoming, options)
        if sha256 is not None:
            raise InvalidRequest("sha256 is of what is uploaded or fetched", "sha256")
        source = Source(str(Path(path).absolute()), narrowed(self._roots, root))
        return await self._publish(name, source, options)

    @pool_call
    async def begin_upload(
        self, name: str, load_inplace: bool, num_bytes: int | None, caller: Caller | None = None
    ) -> str:
        """Return the id of an upload for a name; its weights come in pieces.

        Raises:
            Forbidden: if the caller may hold no more.
            InvalidRequest: if the name cannot be taken, or nothing can be uploaded here.
            InvalidAdapter: if `num_bytes`, the size that is announced, is too much.
            Overloaded: if too many uploads are under way.
            Unavailable: if the disk refuses.
        """
        self._catalog.check_name(name, load_inplace=load_inplace)
        self._catalog.check_room(name, caller, pinned=False)
        return await self._uploads.begin(num_bytes)

    @pool_call
    async def upload_piece(self, upload: str, offset: int, data: bytes) -> None:
        """Take in a piece of an upload, which follows the one before.

        Raises:
            InvalidAdapter: if it is too much.
            Unavailable: if the upload was lost, or the disk refuses.
        """
        await self._uploads.write(upload, offset, data)

    @pool_query
    async def abort_upload(self, upload: str) -> None:
        """Delete what has come of an upload."""
        await self._uploads.abort(upload)

    @pool_call
    async def finish_upload(
        self, upload: str, name: str, config: bytes | None, options: LoadOptions
    ) -> AdapterRecord:
        """Publish an upload under a name; without `config` it is in the header of the weights.

        Raises:
            InvalidRequest, InvalidAdapter, Forbidden: as `load`.
            Unavailable: if the upload was lost, or as `load`.
        """
        async with self._uploads.finished(upload, config, options.sha256) as incoming:
            return await self._publish_incoming(name, incoming, options)

    @pool_call
    async def load_tensors(
        self, name: str, path: str, config: bytes, options: LoadOptions
    ) -> AdapterRecord:
        """Publish the tensors of a safetensors file in this host's shared memory, which is copied.

        Raises:
            InvalidAdapter: if it lies outside of adapter_roots, or of /dev/shm if there are none.
            InvalidRequest, Forbidden, Unavailable: as `load`.
        """
        roots = narrowed(self._roots or (SHARED_MEMORY,), options.root)
        limit = self._config.max_upload
        upload = await self.begin_upload(name, options.load_inplace, None, options.caller)
        try:
            await self._uploads.fill(
                upload, lambda write: copy_regular_file(Path(path), limit, roots, write)
            )
        except BaseException:
            await self._uploads.abort(upload)
            raise
        return await self.finish_upload(upload, name, config, options)

    async def _publish_incoming(
        self, name: str, incoming: Incoming, options: LoadOptions
    ) -> AdapterRecord:
        """Publish what has come and is sealed."""
        async with self._staged.placed(incoming) as source:
            return await self._publish(name, source, options)

    async def _publish(self, name: str, source: Source, options: LoadOptions) -> AdapterRecord:
        """Read a directory whole and publish it under a name; wait until that is saved."""
        async with self._locks.of(name):  # the last call to come is the last to publish
            self._catalog.check_name(name, load_inplace=options.load_inplace)
            self._catalog.check_room(name, options.caller, pinned=options.pinned)
            await self._rate_limiter.acquire()
            loaded = await self._threads.whole(source)
            record = self._catalog.publish(
                name,
                loaded,
                load_inplace=options.load_inplace,
                pinned=options.pinned,
                caller=options.caller,
            )
        self._on_change()
        await self._state.saved()
        return record

    def _on_change(self) -> None:
        """Follow a change of the catalogue."""
        raise NotImplementedError
