"""What a router asks of the adapter pool and of the cluster, as an interface.

An actor answers in a cluster, an object in a test.
"""

from typing import Protocol

from cluster.adapters.records import AdapterRecord, LoadOptions, ResolvedAdapter, UnloadResult
from cluster.messages import AttachedSchedulers
from cluster.metrics_hub import ClusterCounts, RouterCounts
from cluster.tenancy.leases import LeaseCall, LeaseReply
from cluster.tenancy.owners import Caller


class Backend(Protocol):
    """The catalogue of adapters and the list of schedulers; every call may raise Unavailable."""

    async def resolve(self, name: str, request_id: str) -> ResolvedAdapter:
        """Return what one request gets for a name; may have to read it from disk first.

        Raises:
            NotFound: if no adapter has the name, or its directory is gone.
            InvalidAdapter: if it turns out that it cannot be served.
        """
        ...

    async def record(self, name: str) -> AdapterRecord:
        """Return the record of a name.

        Raises:
            NotFound: if no adapter has the name.
        """
        ...

    async def absent(self, names: tuple[str, ...]) -> frozenset[str]:
        """Return which of these names no adapter has, now."""
        ...

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
        """Check an adapter and point the name at its content.

        `path` is a directory of the pool's host, or where it may fetch an adapter from, whose
        weights must have the checksum `sha256`. With `root` nothing outside of that directory is
        read, whatever else the pool may read. `caller` is whose it will be.

        Raises:
            Forbidden: if the caller may hold no more.
            InvalidAdapter: if the directory fails a check.
            InvalidRequest: if the name is taken and `load_inplace` is false, or no more can be
                pinned.
        """
        ...

    async def begin_upload(
        self, name: str, load_inplace: bool, num_bytes: int | None, caller: Caller | None = None
    ) -> str:
        """Return the id of an upload, whose weights come in pieces; see `cluster.router.uploads`.

        Raises:
            Forbidden: if the caller may hold no more.
            InvalidRequest: if the name is taken and `load_inplace` is false.
            InvalidAdapter: if `num_bytes`, the size that is announced, is too much.
            Overloaded: if too many uploads are under way.
        """
        ...

    async def upload_piece(self, upload: str, offset: int, data: bytes) -> None:
        """Take in the piece of an upload that follows the one before.

        Raises:
            InvalidAdapter: if it is too much.
        """
        ...

    async def finish_upload(
        self, upload: str, name: str, config: bytes | None, options: LoadOptions
    ) -> AdapterRecord:
        """Point the name at an upload; without `config` it is in the header of the weights.

        Raises:
            InvalidRequest, InvalidAdapter: as `load`.
        """
        ...

    async def abort_upload(self, upload: str) -> None:
        """Forget an upload that will not be finished."""
        ...

    async def load_tensors(
        self, name: str, path: str, config: bytes, options: LoadOptions
    ) -> AdapterRecord:
        """Point the name at the tensors of a safetensors file in the pool's shared memory.

        Raises:
            InvalidRequest, InvalidAdapter: as `load`.
        """
        ...

    async def unload(self, name: str, force: bool) -> UnloadResult:
        """Take the name out of the catalogue; wait until nothing is left that only it stood for.

        Running requests end first, or are aborted by `force`.

        Raises:
            NotFound: if no adapter has the name.
        """
        ...

    async def rollback(self, name: str, version: int | None) -> AdapterRecord:
        """Give all requests to an earlier version; asked for none, to the one before.

        Raises:
            NotFound: if no adapter has the name.
            Conflict: if the version or its content cannot be had any more.
        """
        ...

    async def split(self, name: str, shares: dict[int, int]) -> AdapterRecord:
        """Give shares of the requests, in percent by version, to versions.

        Raises:
            NotFound: if no adapter has the name.
            InvalidRequest: if the shares do not sum to 100.
            Conflict: if a version or its content cannot be had any more.
        """
        ...

    async def pin(self, name: str, caller: Caller | None = None) -> AdapterRecord:
        """Keep an adapter in host memory and, once it has one, in its slot.

        Raises:
            Forbidden: if the caller may pin no more.
            NotFound: if no adapter has the name.
            InvalidRequest: if no more can be pinned.
            Conflict: if its content cannot be had any more.
        """
        ...

    async def unpin(self, name: str) -> AdapterRecord:
        """Take an adapter's pin away.

        Raises:
            NotFound: if no adapter has the name.
        """
        ...

    async def records(self) -> tuple[AdapterRecord, ...]:
        """Return all records, ordered by name."""
        ...

    async def report(self, counts: RouterCounts, wants_all: bool) -> ClusterCounts:
        """Report a router's counts to the metrics hub; return what it holds if that is wanted."""
        ...

    async def lease(self, call: LeaseCall) -> LeaseReply:
        """Take in what a router says of its limits' accounts; grant what it claims."""
        ...

    async def schedulers(self) -> AttachedSchedulers:
        """Return where the live schedulers listen."""
        ...

    async def drain(self) -> None:
        """Let all routers of the cluster refuse new calls, later ones too."""
        ...

    async def undrain(self) -> None:
        """Let routers take calls again."""
        ...

    async def is_drained(self) -> bool:
        """Return whether routers are to refuse new calls."""
        ...
