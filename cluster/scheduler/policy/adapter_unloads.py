"""Unloads under way: fenced for new requests, waiting for the old ones, then forgotten wholly.

A sum of adapters goes with each of its parts.
"""

from collections.abc import Iterable

from cluster.errors import Conflict
from cluster.request import BASE, has_part, parts_of
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.lora_slots import Resident, SlotTable
from cluster.scheduler.policy.lora_slot_policy import SlotPolicy
from cluster.scheduler.request_queue import RequestQueue
from cluster.scheduler.running import RunningSet
from cluster.scheduler.stats import UnloadedAdapter


class Unloads:
    """The fence, and what came of it."""

    def __init__(
        self,
        cache: PrefixCache,
        slots: SlotTable,
        policy: SlotPolicy,
        waiting: RequestQueue,
        running: RunningSet,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._policy = policy
        self._waiting = waiting
        self._running = running
        self.fenced: dict[str, None] = {}  # digests
        self._done: list[UnloadedAdapter] = []

    def is_fenced(self, adapter: str) -> bool:
        """Whether new requests for an adapter must be refused."""
        return bool(self.fenced) and any(d in self.fenced for d, _ in parts_of(adapter))

    def fence(self, digest: str) -> None:
        """Begin to unload an adapter.

        Raises:
            Conflict: for the base model.
        """
        if digest == BASE:
            raise Conflict("the base model cannot be unloaded")
        self.fenced[digest] = None

    def unfence(self, digest: str) -> None:
        """Take an unload back that is not complete; it is reported as having freed nothing."""
        if digest in self.fenced:
            del self.fenced[digest]
            self._done.append(UnloadedAdapter(digest, freed_pages=0, freed_slots=()))

    def users(self, digest: str) -> list[str]:
        """Return the adapters with this part that wait or have a slot, sorted."""
        residents = [resident.adapter for resident in self._slots.residents()]
        return _with_part(digest, (*self._waiting.adapters(), *residents))

    def settle(self, step: int) -> None:
        """Free the slots and drop the namespaces of each fenced adapter that nobody holds."""
        for digest in tuple(self.fenced):
            if any(has_part(adapter, digest) for adapter in self._waiting.adapters()):
                continue
            residents = [r for r in self._slots.residents() if has_part(r.adapter, digest)]
            evicted = [place for place in self._policy.evicted if has_part(place[1], digest)]
            slots = [resident.slot for resident in residents] + [slot for slot, _ in evicted]
            is_used = any(self._running.uses_slot(slot) for slot in slots)
            if is_used or any(_is_held(resident) for resident in residents):
                continue
            self._policy.forget_evicted(evicted)
            freed = [(self._policy.free(r.adapter, step), r.adapter) for r in residents]
            cached = _with_part(digest, self._cache.adapters())
            pages = sum(self._cache.drop_adapter(adapter) for adapter in cached)
            self._slots.unpin(digest)
            del self.fenced[digest]
            self._done.append(UnloadedAdapter(digest, pages, (*evicted, *freed)))

    def take_done(self) -> list[UnloadedAdapter]:
        """Return what has been completed since the last call."""
        if not self._done:
            return []
        done, self._done = self._done, []
        return done


def _is_held(resident: Resident) -> bool:
    return resident.loading or resident.leases > 0


def _with_part(digest: str, adapters: Iterable[str]) -> list[str]:
    """Return those that `digest` is a part of, each once, sorted."""
    return sorted({adapter for adapter in adapters if has_part(adapter, digest)})
