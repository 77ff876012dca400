"""Waiting sequences by priority, then fair share, then arrival; in one lane for each adapter.

A lane is open while its adapter may admit sequences; the base model's always is. The LoRA slot
policy opens and shuts lanes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

from cluster.request import BASE
from cluster.scheduler.fairness import Flow


class RequestQueue:
    """Flows of waiting sequences; the next one of all open lanes is found without a search."""

    def __init__(self) -> None:
        self._lanes: dict[str, dict[Flow, None]] = {}  # with waiting sequences; never empty
        self._priorities: dict[str, dict[int, int]] = {}  # flows of each priority, by lane
        self._open: set[str] = {BASE}
        self._heads: list[tuple[int, int, int]] = []  # places of open flows, ascending
        self._flow_at: dict[int, Flow] = {}  # by arrival number of the head
        self._moved: dict[Flow, None] = {}  # whose counter changed since the heads were sorted
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def has(self, adapter: str) -> bool:
        """Whether a sequence waits in this lane."""
        return adapter in self._lanes

    def adapters(self) -> Iterable[str]:
        """Return the adapters for which sequences wait."""
        return self._lanes.keys()

    def lane(self, adapter: str) -> tuple[int, ...]:
        """Return the arrival numbers that wait in a lane, ascending."""
        flows = self._lanes.get(adapter, ())
        return tuple(sorted(seq_id for flow in flows for seq_id in flow.waiting))

    def priority(self, adapter: str) -> int:
        """Return the highest priority that waits in a lane, the smallest number; there is one."""
        return min(self._priorities[adapter])

    def is_open(self, adapter: str) -> bool:
        """Whether the lane may admit."""
        return adapter in self._open

    @property
    def num_shut(self) -> int:
        """Sequences in lanes that may not admit."""
        return self._size - sum(len(flow.waiting) for flow in self._flow_at.values())

    def push(self, seq_id: int, flow: Flow) -> None:
        """Put a sequence at its arrival place in its flow."""
        if not flow.waiting:
            self._lanes.setdefault(flow.adapter, {})[flow] = None
            priorities = self._priorities.setdefault(flow.adapter, {})
            priorities[flow.priority] = priorities.get(flow.priority, 0) + 1
        insort(flow.waiting, seq_id)
        self._size += 1
        self._place(flow)

    def remove(self, seq_id: int, flow: Flow) -> None:
        """Take a waiting sequence out."""
        at = bisect_left(flow.waiting, seq_id)
        assert flow.waiting[at : at + 1] == [seq_id], f"sequence {seq_id} does not wait"
        del flow.waiting[at]
        self._size -= 1
        if not flow.waiting:
            self._leave_lane(flow)
        self._place(flow)

    def open(self, adapter: str) -> None:
        """Let a lane admit."""
        if adapter not in self._open:
            self._open.add(adapter)
            for flow in self._lanes.get(adapter, ()):
                self._place(flow)

    def shut(self, adapter: str) -> None:
        """Let a lane admit no more."""
        if adapter in self._open:
            self._open.remove(adapter)
            for flow in self._lanes.get(adapter, ()):
                self._place(flow)

    def charged(self, flow: Flow) -> None:
        """Note that a flow's counter has changed."""
        if flow.place is not None:
            self._moved[flow] = None

    def first(self) -> int | None:
        """Return the arrival number of the sequence whose turn it is, of all open lanes."""
        if self._moved:
            moved, self._moved = self._moved, {}
            for flow in moved:
                self._place(flow)
        return self._heads[0][2] if self._heads else None

    def _leave_lane(self, flow: Flow) -> None:
        lane, priorities = self._lanes[flow.adapter], self._priorities[flow.adapter]
        del lane[flow]
        priorities[flow.priority] -= 1
        if not priorities[flow.priority]:
            del priorities[flow.priority]
        if not lane:
            del self._lanes[flow.adapter], self._priorities[flow.adapter]

    def _place(self, flow: Flow) -> None:
        """Put a flow where it belongs among the heads, or take it out."""
        place = None
        if flow.waiting and flow.adapter in self._open:
            place = (flow.priority, flow.counter, flow.waiting[0])
        if place == flow.place:
            return
        if flow.place is not None:
            del self._heads[bisect_left(self._heads, flow.place)]
            del self._flow_at[flow.place[2]]
        if place is not None:
            insort(self._heads, place)
            self._flow_at[place[2]] = flow
        flow.place = place
