"""Waiting sequences in arrival order, in one lane for each adapter.

A lane is open while its adapter may admit sequences; the base model's always is. Knows nothing of
slots: who opens and closes lanes is `slot_turns`.
"""

from bisect import bisect_left, insort

from cluster.request import BASE


class WaitingQueue:
    """Arrival numbers by adapter; the oldest of all open lanes is found without a search."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[int]] = {}  # arrival numbers, ascending; never empty
        self._open: set[str] = {BASE}
        self._heads: list[tuple[int, str]] = []  # of the open lanes, ascending
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def has(self, adapter: str) -> bool:
        """Whether a sequence waits in this lane."""
        return adapter in self._lanes

    def lane(self, adapter: str) -> tuple[int, ...]:
        """Return the arrival numbers that wait in a lane, ascending."""
        return tuple(self._lanes.get(adapter, ()))

    def is_open(self, adapter: str) -> bool:
        """Whether the lane may admit."""
        return adapter in self._open

    @property
    def num_shut(self) -> int:
        """Sequences in lanes that may not admit."""
        return self._size - sum(len(self._lanes[adapter]) for _, adapter in self._heads)

    def push(self, seq_id: int, adapter: str) -> None:
        """Put a sequence at its arrival place."""
        lane = self._lanes.setdefault(adapter, [])
        old_head = lane[0] if lane else None
        insort(lane, seq_id)
        self._size += 1
        self._move_head(adapter, old_head)

    def remove(self, seq_id: int, adapter: str) -> None:
        """Take a waiting sequence out."""
        lane = self._lanes[adapter]
        old_head = lane[0]
        at = bisect_left(lane, seq_id)
        assert lane[at] == seq_id, f"sequence {seq_id} does not wait for {adapter}"
        del lane[at]
        self._size -= 1
        if not lane:
            del self._lanes[adapter]
        self._move_head(adapter, old_head)

    def open(self, adapter: str) -> None:
        """Let a lane admit."""
        if adapter not in self._open:
            self._open.add(adapter)
            self._move_head(adapter, None)

    def shut(self, adapter: str) -> None:
        """Let a lane admit no more."""
        if adapter in self._open:
            self._open.remove(adapter)
            if adapter in self._lanes:
                del self._heads[bisect_left(self._heads, (self._lanes[adapter][0], adapter))]

    def first(self) -> int | None:
        """Return the oldest sequence of all open lanes."""
        return self._heads[0][0] if self._heads else None

    def _move_head(self, adapter: str, old_head: int | None) -> None:
        """Bring the list of heads up to date after the front of an open lane changed."""
        if adapter not in self._open:
            return
        lane = self._lanes.get(adapter)
        new_head = lane[0] if lane else None
        if new_head == old_head:
            return
        if old_head is not None:
            del self._heads[bisect_left(self._heads, (old_head, adapter))]
        if new_head is not None:
            insort(self._heads, (new_head, adapter))
