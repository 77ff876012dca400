"""What a snapshot of a scheduler says: frozen messages without behaviour.

Holds what cannot be drawn from anything else; where the order of a list decides something, its
order as well.
"""

from typing import Literal

import msgspec

from cluster.request import Request
from cluster.scheduler.lora_slot_policy import Drain
from cluster.scheduler.replay.cache_snapshot import CacheState
from cluster.scheduler.stats import AdapterLoad, UnloadedAdapter
from worker.protocol import Chunk


class SequenceState(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that has not ended."""

    seq_id: int
    request: Request
    output: tuple[int, ...]
    leader: int | None  # who may have ended since
    status: Literal["held", "waiting", "running"]
    num_cached_tokens: int | None


class RunningState(msgspec.Struct, frozen=True, array_like=True):
    """What one of them holds."""

    seq_id: int
    slot: int | None
    lock: int  # index of a node
    pages: tuple[int, ...]
    num_kept: int
    num_computed: int
    duplicates: tuple[int, ...]
    is_decoding: bool
    is_ending: bool
    is_failed: bool


class LeftState(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the ranks still have, but that has ended or waits again."""

    seq_id: int
    slot: int | None


class FlowState(msgspec.Struct, frozen=True, array_like=True):
    """The counter of one flow."""

    priority: int
    tenant: str
    adapter: str
    weight: int
    counter: int


class ResidentState(msgspec.Struct, frozen=True, array_like=True):
    """An adapter in a slot; its leases and pin are told elsewhere."""

    adapter: str
    slot: int
    num_bytes: int
    given: int
    last_use: int
    loading: bool
    served_since: int | None


class Counters(msgspec.Struct, frozen=True, array_like=True):
    """What only `Scheduler.stats` tells."""

    prompt_tokens: int
    cached_prompt_tokens: int
    num_forks: int
    generated_tokens: int
    preemptions: int
    num_loads: int
    largest_adapter: int
    longest_turn_start: int
    longest_wait: int
    num_late: int


class State(msgspec.Struct, frozen=True, array_like=True):
    """Everything."""

    step: int
    last_seq_id: int
    sequences: tuple[SequenceState, ...]  # by arrival
    running: tuple[RunningState, ...]  # by priority and arrival
    untold: tuple[LeftState, ...]
    told: tuple[tuple[LeftState, ...], ...]  # by each step in flight
    in_flight: tuple[tuple[Chunk, ...], ...]  # of the steps that are not committed
    ending: tuple[int, ...]  # running sequences that end with them
    reached: tuple[tuple[int, int], ...]  # priority, and counter of the flow admitted last
    flows: tuple[FlowState, ...]
    open_lanes: tuple[str, ...]
    residents: tuple[ResidentState, ...]  # by slot
    pinned: tuple[tuple[str, int], ...]  # adapter, and bytes that it claims
    line: tuple[tuple[str, int, int], ...]  # adapter, step at which it joined, bound on its wait
    drain: Drain | None
    evicted: tuple[tuple[int, str], ...]  # (slot, adapter) whose memory no load has cleared
    loads: tuple[AdapterLoad, ...]  # that nobody has taken
    fenced: tuple[str, ...]
    unloaded: tuple[UnloadedAdapter, ...]  # that nobody has taken
    cache: CacheState
    counters: Counters
