"""What a router asks of the adapter pool and of the cluster, as an interface.

Knows nothing of who answers: an actor in a cluster, an object in a test.
"""

from typing import Protocol

from cluster.adapters.record import AdapterRecord, UnloadResult
from cluster.wire import SchedulerAddress


class Backend(Protocol):
    """The catalogue of adapters and the list of schedulers; every call may raise Unavailable."""

    async def resolve(self, name: str) -> AdapterRecord:
        """Return the record of a name.

        Raises:
            NotFound: if no adapter has the name.
        """
        ...

    async def load(self, name: str, path: str, load_inplace: bool, pinned: bool) -> AdapterRecord:
        """Check an adapter directory and point the name at its content.

        Raises:
            InvalidAdapter: if the directory fails a check.
            InvalidRequest: if the name is taken and `load_inplace` is false.
        """
        ...

    async def unload(self, name: str) -> UnloadResult:
        """Take the name out of the catalogue.

        Raises:
            NotFound: if no adapter has the name.
        """
        ...

    async def forget(self, digest: str) -> None:
        """Drop the content from host memory, unless a name points at it again."""
        ...

    async def records(self) -> tuple[AdapterRecord, ...]:
        """Return all records, ordered by name."""
        ...

    async def schedulers(self) -> tuple[SchedulerAddress, ...]:
        """Return where the live schedulers listen, ordered by replica."""
        ...
