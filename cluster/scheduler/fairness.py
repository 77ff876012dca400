"""Whose turn it is: a virtual counter of the work done for each flow, in integers.

A flow is what one tenant asks of one adapter at one priority. Each computed token moves its flow's
counter on; the waiting flow with the smallest counter is admitted next. A flow that was idle starts
where the others are: it gets no credit for its silence. Service counters for batched generation are
the idea of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024); where a newcomer
starts, the counter of the flow admitted last, is start-time fair queueing (Goyal et al., 1996).
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

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
