"""Waiting sequences by priority, then fair share, then arrival; in one lane for each adapter.

A lane is open while its adapter may admit sequences; the base model's always is. The LoRA slot
policy opens and shuts lanes.

A fair share is a virtual counter of the work done for each flow, in integers; a flow is what one
tenant asks of one adapter at one priority. Each computed token moves its flow's counter on; the
waiting flow with the smallest counter is admitted next. A flow that was idle starts where the
others are: it gets no credit for its silence. Service counters for batched generation are the idea
of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024); where a newcomer starts,
the counter of the flow admitted last, is start-time fair queueing (Goyal et al., 1996).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from cluster.request import BASE

PREFILL_COST = 1
DECODE_COST = 2  # a token drawn costs more than a token read: Sheng et al. use the same two
_SCALE = 2**20  # so that a heavy weight still leaves a whole number
MAX_IDLE_FLOWS = 1024  # of one priority, whose counters are remembered


@dataclass(slots=True, eq=False)
class Flow:
    """The requests of one tenant for one adapter at one priority."""

    tenant: str
    adapter: str
    priority: int
    weight: int = 1  # of the request that came last
    counter: int = 0
    num_live: int = 0  # sequences that wait or run
    waiting: list[int] = field(default_factory=list)  # arrival numbers, ascending
    place: tuple[int, int, int] | None = None  # among the heads of the request queue
    idle_at: int | None = None  # counter of its entry among the idle flows, if it has one

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from other flows of its priority."""
        return self.tenant, self.adapter


@dataclass(slots=True)
class _PriorityClass:
    """All flows of one priority; only these compete by counter."""

    reached: int = 0  # counter of the flow admitted last; never falls
    num_live: int = 0
    flows: dict[tuple[str, str], Flow] = field(default_factory=dict)
    # Flows without a live sequence, each with the counter that it had then; a heap.
    idle: list[tuple[int, tuple[str, str]]] = field(default_factory=list)

    def forget_idle(self) -> None:
        """Drop the idle flows that no later arrival could tell from new ones, and the surplus.

        Of more than MAX_IDLE_FLOWS those go that are least ahead: tenants and adapters come from
        clients, and must not pile up.
        """
        idle = self.idle
        while idle and (idle[0][0] <= self.reached or len(idle) > MAX_IDLE_FLOWS):
            counter, key = heappop(idle)
            flow = self.flows.get(key)
            if flow is None or flow.idle_at != counter:
                continue  # an older entry of a flow that has been live since
            flow.idle_at = None
            if flow.num_live == 0:
                del self.flows[key]


class Fairness:
    """The counters. Switched off, all stay 0, and arrival alone decides."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._classes: dict[int, _PriorityClass] = {}

    def enter(self, tenant: str, adapter: str, priority: int, weight: int) -> Flow:
        """Return the flow of a sequence that arrives; `leave` must follow once."""
        if not self.enabled:
            tenant = ""
        peers = self._classes.setdefault(priority, _PriorityClass())
        flow = peers.flows.get((tenant, adapter))
        if flow is None:
            flow = peers.flows[tenant, adapter] = Flow(tenant, adapter, priority)
        if flow.num_live == 0:
            flow.counter = max(flow.counter, peers.reached)
        flow.weight = weight
        flow.num_live += 1
        peers.num_live += 1
        return flow

    def leave(self, flow: Flow) -> None:
        """Count out a sequence that has ended."""
        peers = self._classes[flow.priority]
        flow.num_live -= 1
        peers.num_live -= 1
        assert flow.num_live >= 0, "a sequence leaves its flow twice"
        if peers.num_live == 0:
            del self._classes[flow.priority]
        elif flow.num_live == 0 and flow.idle_at != flow.counter:
            flow.idle_at = flow.counter
            heappush(peers.idle, (flow.counter, flow.key))
            peers.forget_idle()

    def admitted(self, flow: Flow) -> None:
        """Note that it was this flow's turn."""
        peers = self._classes[flow.priority]
        if flow.counter > peers.reached:
            peers.reached = flow.counter
            peers.forget_idle()

    def charge(self, flow: Flow, cost: int) -> None:
        """Move a flow's counter on for work done, the less the greater its weight."""
        if self.enabled:
            flow.counter += cost * _SCALE // flow.weight


class RequestQueue:
    """Flows of waiting sequences; the next one of all open lanes is found without a search."""

    def __init__(self) -> None:
        self._lanes: dict[str, dict[Flow, None]] = {}  # with waiting sequences; never empty
        self._priorities: dict[str, dict[int, int]] = {}  # flows of each priority, by lane
        self._open: set[str] = {BASE}
        self._heads: list[tuple[int, int, int]] = []  # places of open flows, ascending
        self._flow_at: dict[int, Flow] = {}  # by arrival number of the head
        self._moved: dict[Flow, None] = {}  # whose counter changed since the heads were sorted
        self.size = 0  # sequences
        self.size_by_tenant: dict[str, int] = {}  # none is 0

    def __len__(self) -> int:
        return self.size

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
        return self.size - sum(len(flow.waiting) for flow in self._flow_at.values())

    def push(self, seq_id: int, flow: Flow) -> None:
        """Put a sequence at its arrival place in its flow."""
        if not flow.waiting:
            self._lanes.setdefault(flow.adapter, {})[flow] = None
            priorities = self._priorities.setdefault(flow.adapter, {})
            priorities[flow.priority] = priorities.get(flow.priority, 0) + 1
        insort(flow.waiting, seq_id)
        self.size += 1
        self.size_by_tenant[flow.tenant] = self.size_by_tenant.get(flow.tenant, 0) + 1
        self._place(flow)

    def remove(self, seq_id: int, flow: Flow) -> None:
        """Take a waiting sequence out."""
        at = bisect_left(flow.waiting, seq_id)
        assert flow.waiting[at : at + 1] == [seq_id], f"sequence {seq_id} does not wait"
        del flow.waiting[at]
        self.size -= 1
        self.size_by_tenant[flow.tenant] -= 1
        if not self.size_by_tenant[flow.tenant]:
            del self.size_by_tenant[flow.tenant]
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
        """Note that the counter of a flow with a place has changed."""
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
