"""What the scheduler reports of itself: gauges, counters, and the loads and unloads to carry out.

A field that is annotated with a name and a meaning is a metric: the router makes its Prometheus
family out of the annotation. So a new counter is one field here and the line that counts it.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta


def metric(name: str, text: str) -> Meta:
    """Return the annotation of a field that is the metric `topwork_<name>` (counters: `_total`)."""
    return Meta(title=name, description=text)


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


class CacheReset(msgspec.Struct, frozen=True):
    """What came of a reset of the prefix cache; in pages."""

    freed_pages: int  # on the device
    freed_host_pages: int
    kept_pages: int  # on either tier: prefixes of running sequences


class SlotStats(msgspec.Struct, frozen=True):
    """One occupied adapter slot."""

    slot: int
    adapter: str
    loading: bool
    leases: int  # sequences that hold the adapter
    pinned: bool = False
    claimed_bytes: int = 0  # on each rank, at most
    held_bytes: int = 0  # on the rank that holds most, once it is loaded: the engine's to fill in


class SchedulerCounters(msgspec.Struct):
    """Counted by the parts of one scheduler in its life; nothing decides by them."""

    prompt_tokens: Annotated[
        int, metric("engine_prompt_tokens", "Prompt tokens of admitted sequences.")
    ] = 0
    cached_prompt_tokens: Annotated[
        int, metric("engine_cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
    ] = 0
    generated_tokens: Annotated[
        int, metric("engine_generation_tokens", "Tokens sampled or forced by a grammar.")
    ] = 0
    forced_tokens: Annotated[
        int,
        metric("engine_forced_tokens", "Output tokens that a grammar left no choice about."),
    ] = 0
    preemptions: Annotated[int, metric("preemptions", "Sequences whose pages were taken back.")] = 0
    share_preemptions: Annotated[
        int,
        metric("share_preemptions", "Preemptions for a tenant that had less than its share."),
    ] = 0
    share_deferrals: Annotated[
        int,
        metric(
            "share_deferrals",
            "Steps that tenants over their share left to prompts of one that had had less.",
        ),
    ] = 0
    forked_sequences: Annotated[
        int,
        metric(
            "forked_sequences", "Sequences that began on the pages of another one of their prompt."
        ),
    ] = 0
    evicted_pages: Annotated[
        int, metric("kv_blocks_evicted", "KV pages evicted from the prefix cache.")
    ] = 0
    saved_pages: Annotated[
        int, metric("kv_host_blocks_saved", "KV pages copied from device to host.")
    ] = 0
    restored_pages: Annotated[
        int, metric("kv_host_blocks_restored", "KV pages copied from host to device.")
    ] = 0
    evicted_host_pages: Annotated[
        int, metric("kv_host_blocks_evicted", "KV pages evicted from the host tier.")
    ] = 0
    dropped_host_pages: Annotated[
        int,
        metric("kv_host_blocks_dropped", "Host pages freed by unloads and resets."),
    ] = 0
    evicted_checkpoints: Annotated[
        int,
        metric("kv_checkpoints_evicted", "Checkpoints of prefixes that no tier had room for."),
    ] = 0
    evicted_host_checkpoints: Annotated[
        int,
        metric("kv_host_checkpoints_evicted", "Checkpoints evicted from the host tier."),
    ] = 0
    saved_checkpoint_pages: Annotated[
        int,
        metric("kv_checkpoint_blocks_saved", "Window and state pages copied to the host."),
    ] = 0
    restored_checkpoint_pages: Annotated[
        int,
        metric("kv_checkpoint_blocks_restored", "Window and state pages copied from the host."),
    ] = 0
    adapter_loads: Annotated[
        int, metric("adapter_loads", "Loads of an adapter into a slot that have begun.")
    ] = 0
    late_slots: Annotated[
        int,
        metric(
            "adapter_slot_late_hand_overs",
            "Slots that an adapter got later than the bound on its wait was when it queued.",
        ),
    ] = 0

    def add(self, other: "SchedulerCounters") -> None:
        """Count in what another scheduler has counted."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler as of now."""

    step: Annotated[
        int, metric("engine_step", "Number of the last step of this group of ranks.")
    ] = 0
    num_running: Annotated[int, metric("requests_running", "Sequences in the running set.")] = 0
    num_waiting: Annotated[int, metric("requests_waiting", "Sequences that wait.")] = 0
    num_waiting_for_adapter: Annotated[
        int,
        metric("requests_waiting_for_adapter", "Sequences that wait for a slot or for weights."),
    ] = 0
    total_pages: Annotated[int, metric("kv_blocks", "KV pages.")] = 0
    free_pages: Annotated[int, metric("kv_blocks_free", "KV pages without content.")] = 0
    cached_pages: Annotated[
        int, metric("kv_blocks_cached", "KV pages that only the prefix cache holds.")
    ] = 0
    held_pages: Annotated[int, metric("kv_blocks_held", "KV pages that sequences hold.")] = 0
    total_host_pages: Annotated[int, metric("kv_host_blocks", "KV pages of the host tier.")] = 0
    free_host_pages: Annotated[
        int, metric("kv_host_blocks_free", "KV pages of the host tier without content.")
    ] = 0
    cached_host_pages: Annotated[
        int, metric("kv_host_blocks_cached", "KV pages of the host tier with content.")
    ] = 0
    total_window_pages: Annotated[
        int, metric("kv_window_blocks", "KV pages of layers with a sliding window.")
    ] = 0
    free_window_pages: Annotated[
        int, metric("kv_window_blocks_free", "Window pages without content.")
    ] = 0
    cached_window_pages: Annotated[
        int, metric("kv_window_blocks_cached", "Window pages that only checkpoints have.")
    ] = 0
    held_window_pages: Annotated[
        int, metric("kv_window_blocks_held", "Window pages that sequences hold.")
    ] = 0
    total_host_window_pages: Annotated[
        int, metric("kv_window_host_blocks", "Window pages of the host tier.")
    ] = 0
    free_host_window_pages: Annotated[
        int, metric("kv_window_host_blocks_free", "Window pages of the host tier without content.")
    ] = 0
    total_state_pages: Annotated[
        int, metric("kv_state_blocks", "States that layers with states have room for.")
    ] = 0
    free_state_pages: Annotated[
        int, metric("kv_state_blocks_free", "State pages without content.")
    ] = 0
    cached_state_pages: Annotated[
        int, metric("kv_state_blocks_cached", "State pages that only checkpoints have.")
    ] = 0
    held_state_pages: Annotated[
        int, metric("kv_state_blocks_held", "State pages that sequences hold.")
    ] = 0
    total_host_state_pages: Annotated[
        int, metric("kv_state_host_blocks", "State pages of the host tier.")
    ] = 0
    free_host_state_pages: Annotated[
        int, metric("kv_state_host_blocks_free", "State pages of the host tier without content.")
    ] = 0
    num_checkpoints: Annotated[
        int, metric("kv_checkpoints", "Positions at which cached prefixes can be resumed.")
    ] = 0
    num_slots: Annotated[int, metric("adapter_slots", "Adapter slots.")] = 0
    adapter_memory: Annotated[
        int,
        metric(
            "adapter_memory_total_bytes", "Memory of a rank for adapters in slots; 0: no limit."
        ),
    ] = 0
    slot_wait_bound: Annotated[
        int,
        metric(
            "adapter_slot_wait_bound_steps",
            "Steps that an adapter which queues for a slot now waits at most.",
        ),
    ] = 0
    longest_slot_wait: Annotated[
        int,
        metric(
            "adapter_slot_wait_longest_steps",
            "Steps that an adapter has waited for a slot at most so far.",
        ),
    ] = 0
    longest_turn_start: int = 0  # steps from getting a slot to its first use or loss
    slots: tuple[SlotStats, ...] = ()  # by slot
    counters: SchedulerCounters = msgspec.field(default_factory=SchedulerCounters)
