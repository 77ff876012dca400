"""The one eviction policy: device slots, KV pages and the host adapter pool all ask this class.

Owns an order, (last use in steps, number), smallest first, over the things that may go. Does not
know what they are, nor why the others must stay.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

_MIN_HEAP = 64  # below this, stale heap entries are not worth a rebuild


class Lru(Generic[T]):
    """Evictable things by number; each number is unique among all things that come here."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, T]] = {}
        self._heap: list[tuple[int, int]] = []  # (last use, number); stale unless in _live

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
        if len(self._heap) > _MIN_HEAP + 2 * len(self._live):
            self._heap = [(used, live) for live, (used, _) in self._live.items()]
            heapify(self._heap)

    def remove(self, number: int) -> None:
        """Keep a thing that was evictable."""
        del self._live[number]

    def pop(self) -> T:
        """Take out the thing that goes first; there must be one."""
        while True:
            last_use, number = heappop(self._heap)
            entry = self._live.get(number)
            if entry is not None and entry[0] == last_use:
                del self._live[number]
                return entry[1]
