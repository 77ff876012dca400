"""Waiting sequences by priority, then fair share, then arrival; in one lane for each adapter.

A lane is open while its adapter may admit sequences; the base model's always is. The LoRA slot
policy opens and shuts lanes.

A fair share is a virtual counter of the work done, in integers. First the tenants of one priority
compete, each with its weight; then the adapters of the tenant whose turn it is, as equals: many
adapters are no larger share. Each computed token moves the counters of its tenant and its flow on,
a flow being what one tenant asks of one adapter at one priority; of those that wait the smallest
counter is admitted next. Who was idle starts where the others are: there is no credit for silence.
Service counters for batched generation are the idea of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024); where a newcomer starts, the counter of the one admitted last, is
start-time fair queueing (Goyal et al., 1996).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

from cluster.request import BASE
from cluster.tenancy.shared_room import SharedRoom

PREFILL_COST = 1
DECODE_COST = 2  # a token drawn costs more than a token read: Sheng et al. use the same two
_SCALE = 2**20  # so that a heavy weight still leaves a whole number
MAX_IDLE = 1024  # tenants of one priority, or flows of one tenant, whose counters are remembered


@dataclass(slots=True, eq=False)
class Account:
    """A counter of the work done for one of several peers."""

    key: str
    counter: int = 0
    num_live: int = 0  # sequences that wait or run
    idle_at: int | None = None  # counter of its entry among the idle ones, if it has one


A = TypeVar("A", bound=Account)


@dataclass(slots=True)
class Peers(Generic[A]):
    """Accounts that compete by their counters."""

    reached: int = 0  # counter of the one admitted last; never falls
    num_live: int = 0  # sequences of all of them
    by_key: dict[str, A] = field(default_factory=dict)
    # Those without a live sequence, each with the counter that it had then; a heap.
    idle: list[tuple[int, str]] = field(default_factory=list)

    def enter(self, key: str, make: Callable[[], A]) -> A:
        """Return the account of a sequence that arrives; `leave` must follow once."""
        account = self.by_key.get(key)
        if account is None:
            account = self.by_key[key] = make()
        if account.num_live == 0:
            account.counter = max(account.counter, self.reached)
        account.num_live += 1
        self.num_live += 1
        return account

    def leave(self, account: A) -> None:
        """Count out a sequence that has ended."""
        account.num_live -= 1
        self.num_live -= 1
        assert account.num_live >= 0, "a sequence leaves its flow twice"
        if account.num_live == 0 and account.idle_at != account.counter:
            account.idle_at = account.counter
            heappush(self.idle, (account.counter, account.key))
            self.forget_idle()

    def admitted(self, account: A) -> None:
        """Note that it was this one's turn."""
        if account.counter > self.reached:
            self.reached = account.counter
            self.forget_idle()

    def forget_idle(self) -> None:
        """Drop the idle ones that no later arrival could tell from new ones, and the surplus.

        Of more than MAX_IDLE those go that are least ahead: tenants and adapters come from
        clients, and must not pile up.
        """
        idle = self.idle
        while idle and (idle[0][0] <= self.reached or len(idle) > MAX_IDLE):
            counter, key = heappop(idle)
            account = self.by_key.get(key)
            if account is None or account.idle_at != counter:
                continue  # an older entry of one that has been live since
            account.idle_at = None
            if account.num_live == 0:
                del self.by_key[key]


@dataclass(slots=True, eq=False)
class TenantShare(Account):
    """What one tenant, which is the key, asks at one priority."""

    priority: int = 0
    weight: int = 1  # of the request that came last
    flows: "Peers[Flow]" = field(default_factory=lambda: Peers[Flow]())
    heads: list[tuple[int, int]] = field(default_factory=list)  # places of open flows, ascending
    flow_at: "dict[int, Flow]" = field(default_factory=dict)  # by arrival number of the head
    place: tuple[int, int, int] | None = None  # among the heads of the request queue


@dataclass(slots=True, eq=False)
class Flow(Account):
    """The requests of one tenant for one adapter, which is the key, at one priority."""

    share: TenantShare = field(kw_only=True)
    waiting: list[int] = field(default_factory=list)  # arrival numbers, ascending
    place: tuple[int, int] | None = None  # among the heads of its tenant

    @property
    def adapter(self) -> str:
        """The adapter that is asked for."""
        return self.key

    @property
    def tenant(self) -> str:
        """Who asks."""
        return self.share.key

    @property
    def priority(self) -> int:
        """Smaller goes first."""
        return self.share.priority


class Fairness:
    """The counters. Switched off, all stay 0, and arrival alone decides."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._classes: dict[int, Peers[TenantShare]] = {}  # by priority; with live sequences

    def enter(self, tenant: str, adapter: str, priority: int, weight: int) -> Flow:
        """Return the flow of a sequence that arrives; `leave` must follow once."""
        if not self.enabled:
            tenant = ""
        peers = self._classes.setdefault(priority, Peers())
        share = peers.enter(tenant, lambda: TenantShare(tenant, priority=priority))
        share.weight = weight
        return share.flows.enter(adapter, lambda: Flow(adapter, share=share))

    def leave(self, flow: Flow) -> None:
        """Count out a sequence that has ended."""
        share = flow.share
        share.flows.leave(flow)
        if share.flows.num_live == 0:
            share.flows = Peers()  # a tenant's flows compete only while it has some
        peers = self._classes[share.priority]
        peers.leave(share)
        if peers.num_live == 0:
            del self._classes[share.priority]

    def admitted(self, flow: Flow) -> None:
        """Note that it was this flow's turn."""
        self._classes[flow.priority].admitted(flow.share)
        flow.share.flows.admitted(flow)

    def charge(self, flow: Flow, cost: int) -> None:
        """Move counters on for work done, the tenant's the less the greater its weight."""
        if self.enabled:
            flow.counter += cost * _SCALE
            flow.share.counter += cost * _SCALE // flow.share.weight

    def weights(self) -> dict[str, int]:
        """Return the weight of every tenant that has sequences, the last it came with."""
        return {
            share.key: share.weight
            for priority in sorted(self._classes)
            for share in self._classes[priority].by_key.values()
            if share.num_live
        }


class RequestQueue:
    """Flows of waiting sequences; the next one of all open lanes is found without a search.

    `room` has the places in which they wait; it refuses nobody here.
    """

    def __init__(self, room: SharedRoom) -> None:
        self.room = room
        self._lanes: dict[str, dict[Flow, None]] = {}  # with waiting sequences; never empty
        self._priorities: dict[str, dict[int, int]] = {}  # flows of each priority, by lane
        self._open: set[str] = {BASE}
        self._heads: list[tuple[int, int, int]] = []  # places of tenants, ascending
        self._share_at: dict[int, TenantShare] = {}  # by arrival number of the head
        self._moved: dict[Flow, None] = {}  # whose counter changed since the heads were sorted
        self.size = 0  # sequences

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
        open_flows = (flow for share in self._share_at.values() for flow in share.flow_at.values())
        return self.size - sum(len(flow.waiting) for flow in open_flows)

    def push(self, seq_id: int, flow: Flow) -> None:
        """Put a sequence at its arrival place in its flow."""
        if not flow.waiting:
            self._lanes.setdefault(flow.adapter, {})[flow] = None
            priorities = self._priorities.setdefault(flow.adapter, {})
            priorities[flow.priority] = priorities.get(flow.priority, 0) + 1
        insort(flow.waiting, seq_id)
        self.size += 1
        self.room.take(flow.tenant, 1, flow.share.weight)
        self._place(flow)

    def remove(self, seq_id: int, flow: Flow) -> None:
        """Take a waiting sequence out."""
        at = bisect_left(flow.waiting, seq_id)
        assert flow.waiting[at : at + 1] == [seq_id], f"sequence {seq_id} does not wait"
        del flow.waiting[at]
        self.size -= 1
        self.room.give_back(flow.tenant, 1)
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
        """Note that the counters of a flow and its tenant have changed."""
        if flow.share.place is not None:
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
        """Put a flow where it belongs among its tenant's, and the tenant among the others."""
        share = flow.share
        place = None
        if flow.waiting and flow.adapter in self._open:
            place = (flow.counter, flow.waiting[0])
        if place != flow.place:
            if flow.place is not None:
                del share.heads[bisect_left(share.heads, flow.place)]
                del share.flow_at[flow.place[1]]
            if place is not None:
                insort(share.heads, place)
                share.flow_at[place[1]] = flow
            flow.place = place
        self._place_share(share)

    def _place_share(self, share: TenantShare) -> None:
        place = (share.priority, share.counter, share.heads[0][1]) if share.heads else None
        if place == share.place:
            return
        if share.place is not None:
            del self._heads[bisect_left(self._heads, share.place)]
            del self._share_at[share.place[2]]
        if place is not None:
            insort(self._heads, place)
            self._share_at[place[2]] = share
        share.place = place
