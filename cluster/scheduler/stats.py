"""What the scheduler tells of itself; frozen messages without behaviour."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A load to start now: the adapter may be used when `Scheduler.adapter_ready` says so.

    What it clears is cleared before any load that is taken later.
    """

    adapter: str
    slot: int
    clears: tuple[tuple[int, str], ...] = ()  # (slot, adapter) that give their memory
    replaces: str | None = None  # what its own slot may hold until then: it goes in any case


@dataclass(frozen=True, slots=True)
class UnloadedAdapter:
    """An unload that is complete: nothing of the adapter is left here, nor of sums with it."""

    digest: str
    freed_pages: int
    freed_slots: tuple[tuple[int, str], ...]  # (slot, adapter that was in it)


@dataclass(frozen=True, slots=True)
class SlotStats:
    """One occupied slot."""

    slot: int
    adapter: str
    loading: bool
    leases: int
    pinned: bool
    num_bytes: int  # that it claims on each rank


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges and counters; counters never fall in the life of one scheduler."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_adapter: int = 0
    free_pages: int = 0
    cached_pages: int = 0  # in the prefix cache and evictable
    held_pages: int = 0  # by running sequences
    total_pages: int = 0
    num_slots: int = 0
    adapter_memory: int = 0
    slots: tuple[SlotStats, ...] = ()  # by slot
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    adapter_loads: int = 0
    free_host_pages: int = 0
    cached_host_pages: int = 0
    total_host_pages: int = 0
    saved_pages: int = 0  # from device to host, in the life of the scheduler
    restored_pages: int = 0  # and back
    evicted_host_pages: int = 0
    forked_sequences: int = 0  # that began on another one's pages
    longest_turn_start: int = 0  # steps from the hand-over of a slot to its first use or loss
    slot_wait_bound: int = 0  # steps that an adapter which joins the line now waits at most
    longest_slot_wait: int = 0  # steps from joining the line for a slot to its hand-over
    late_hand_overs: int = 0  # after more steps than the bound was when the adapter joined
