"""Unloads under way: fenced for new requests, waiting for the old ones, then forgotten wholly."""

from cluster.errors import Conflict
from cluster.request import BASE
from cluster.scheduling.prefix_cache import PrefixCache
from cluster.scheduling.running_set import RunningSet
from cluster.scheduling.slot_table import Resident, SlotTable
from cluster.scheduling.slot_turns import SlotTurns
from cluster.scheduling.stats import UnloadedAdapter
from cluster.scheduling.waiting_queue import WaitingQueue


class Unloads:
    """The fence, and what came of it."""

    def __init__(
        self,
        cache: PrefixCache,
        slots: SlotTable,
        turns: SlotTurns,
        waiting: WaitingQueue,
        running: RunningSet,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._turns = turns
        self._waiting = waiting
        self._running = running
        self._fenced: dict[str, None] = {}
        self._done: list[UnloadedAdapter] = []

    def is_fenced(self, digest: str) -> bool:
        """Whether new requests for an adapter must be refused."""
        return digest in self._fenced

    def fence(self, digest: str) -> None:
        """Begin to unload an adapter.

        Raises:
            Conflict: for the base model.
        """
        if digest == BASE:
            raise Conflict("the base model cannot be unloaded")
        self._fenced[digest] = None

    def unfence(self, digest: str) -> None:
        """Take an unload back that is not complete; it is reported as having freed nothing."""
        if digest in self._fenced:
            del self._fenced[digest]
            self._done.append(UnloadedAdapter(digest, freed_pages=0, freed_slot=None))

    def settle(self, step: int) -> None:
        """Free the slot and drop the namespaces of each fenced adapter that nobody holds."""
        for digest in tuple(self._fenced):
            resident = self._slots.get(digest)
            if self._waiting.has(digest) or (resident is not None and self._is_held(resident)):
                continue
            slot = None if resident is None else self._turns.free(digest, step)
            self._slots.unpin(digest)
            del self._fenced[digest]
            self._done.append(UnloadedAdapter(digest, self._cache.drop_adapter(digest), slot))

    @property
    def is_pending(self) -> bool:
        """Whether some unload is not complete."""
        return bool(self._fenced)

    def take_done(self) -> list[UnloadedAdapter]:
        """Return what has been completed since the last call."""
        done, self._done = self._done, []
        return done

    def _is_held(self, resident: Resident) -> bool:
        in_use = resident.loading or resident.leases > 0
        return in_use or not self._running.is_quiet(resident.slot)
