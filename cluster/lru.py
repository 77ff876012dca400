"""The one eviction policy: device slots, KV pages of both tiers and the host adapter pool ask it.

Owns an order, (last use in steps, number), smallest first, over the things that may go. Does not
know what they are, nor why the others must stay. No call takes time in proportion to all of them.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

_MIN_HEAP = 64  # below this, stale heap entries are not worth a sweep
_SWEEP = 4  # entries that one call looks at; more than one, so that a sweep ends


class Lru(Generic[T]):
    """Evictable things by number; each number is unique among all things that come here."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, T]] = {}
        self._heap: list[tuple[int, int]] = []  # (last use, number); stale unless in _live
        self._unswept: list[tuple[int, int]] = []  # another heap; what is live moves to the first

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, number: int) -> bool:
        return number in self._live

    def __iter__(self) -> Iterator[T]:
        """Yield the things in the order in which they would go."""
        order = sorted((last_use, number) for number, (last_use, _) in self._live.items())
        return (self._live[number][1] for _, number in order)

    def add(self, last_use: int, number: int, item: T) -> None:
        """Let `item` be evicted, in its turn."""
        assert number not in self._live, f"{number} is evictable already"
        self._live[number] = (last_use, item)
        heappush(self._heap, (last_use, number))
        if self._unswept:
            self._sweep()
        elif len(self._heap) > _MIN_HEAP + 2 * len(self._live):
            self._unswept, self._heap = self._heap, []

    def remove(self, number: int) -> None:
        """Keep a thing that was evictable."""
        del self._live[number]

    def discard(self, number: int) -> None:
        """Keep a thing, whether it was evictable or not."""
        self._live.pop(number, None)

    def pop(self) -> T:
        """Take out the thing that goes first; there must be one."""
        while True:
            heap = self._heap
            if self._unswept and not (heap and heap[0] <= self._unswept[0]):
                heap = self._unswept
            entry = heappop(heap)
            if self._is_live(entry):
                return self._live.pop(entry[1])[1]

    def _is_live(self, entry: tuple[int, int]) -> bool:
        last_use, number = entry
        live = self._live.get(number)
        return live is not None and live[0] == last_use

    def _sweep(self) -> None:
        """Move a few entries over, or drop them; a heap stays one when its last entry goes."""
        for _ in range(min(_SWEEP, len(self._unswept))):
            entry = self._unswept.pop()
            if self._is_live(entry):
                heappush(self._heap, entry)
