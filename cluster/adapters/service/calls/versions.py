"""What calls do to the versions of a name that the pool has: shares, and pins."""

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.records import AdapterRecord
from cluster.adapters.service.calls.in_flight import InFlightCalls, pool_call
from cluster.adapters.service.directory_watcher import DirectoryWatcher, NameLocks
from cluster.adapters.service.pool_state import PoolState
from cluster.adapters.service.store import AdapterStore
from cluster.tenancy.owners import Caller


class VersionCalls:
    """Methods of the pool's actor."""

    _calls: InFlightCalls
    _catalog: AdapterCatalog
    _locks: NameLocks
    _state: PoolState
    _store: AdapterStore
    _watcher: DirectoryWatcher

    @pool_call
    async def rollback(self, name: str, version: int | None) -> AdapterRecord:
        """Give all requests to an earlier version; asked for none, to the one before.

        Raises:
            NotFound: if there is no such name.
            Conflict: if that version is not kept, or its content cannot be had any more.
        """
        async with self._locks.of(name):
            number = self._catalog.rollback_target(name, version).number
            loaded = await self._store.obtain(
                name, lambda: (self._catalog.rollback_target(name, number),)
            )
            record = self._catalog.rollback(name, number, loaded)
            self._watcher.dismiss(name)
        self._on_change()
        await self._state.saved()
        return record

    @pool_call
    async def split(self, name: str, shares: dict[int, int]) -> AdapterRecord:
        """Give shares of the requests, in percent by version, to kept versions.

        Raises:
            NotFound: if there is no such name.
            InvalidRequest: if the shares do not sum to 100.
            Conflict: if a version is not kept, or its content cannot be had any more.
        """
        async with self._locks.of(name):
            loaded = await self._store.obtain(
                name, lambda: self._catalog.split_targets(name, shares)
            )
            record = self._catalog.split(name, shares, loaded)
            self._watcher.dismiss(name)
        self._on_change()
        await self._state.saved()
        return record

    @pool_call
    async def pin(self, name: str, caller: Caller | None = None) -> AdapterRecord:
        """Keep what a name's requests get in host memory and, once it has one, in its slot.

        `caller` is whose pin it will be.

        Raises:
            Forbidden: if the caller may pin no more.
            NotFound: if there is no such name.
            InvalidRequest: if no more can be pinned.
            Conflict: if its content cannot be had any more.
        """
        async with self._locks.of(name):
            loaded = await self._store.obtain(name, lambda: self._catalog.pin_targets(name))
            record = self._catalog.pin(name, loaded, caller)
        self._on_change()
        await self._state.saved()
        return record

    @pool_call
    async def unpin(self, name: str) -> AdapterRecord:
        """Let a name's content go like others' when its place is needed.

        Raises:
            NotFound: if there is no such name.
        """
        async with self._locks.of(name):
            record = self._catalog.unpin(name)
        self._on_change()
        await self._state.saved()
        return record

    def _on_change(self) -> None:
        """Follow a change of the catalogue."""
        raise NotImplementedError
