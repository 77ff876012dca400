"""The series of scheduler replicas and their ranks, out of what they report.

Owns the names and meanings of these metrics. A counter outlives the ranks of its replica; when the
replica's own process ends it begins at zero again, under the same label. Knows nothing of how
reports are had.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from cluster.histogram import (
    COUNT_BUCKETS,
    E2E_BUCKETS,
    LOAD_BUCKETS,
    STEP_BUCKETS,
    TTFT_BUCKETS,
)
from cluster.messages import Status
from cluster.router.metrics.families import counter, gauge, histogram
from cluster.router.replica_set import Report

UP = gauge("scheduler_up", "1 if the scheduler answers.", "replica")
GAUGES = tuple(
    (gauge(name, text, "replica"), field)
    for name, text, field in (
        ("requests_running", "Sequences in the running set.", "num_running"),
        ("requests_waiting", "Sequences that wait.", "num_waiting"),
        ("requests_waiting_for_adapter", "Sequences that wait for a slot or for weights.",
         "num_waiting_for_adapter"),
        ("queue_age_seconds", "Wait so far of the oldest sequence that has never run, else 0.",
         "oldest_wait"),
        ("kv_blocks", "KV pages.", "total_pages"),
        ("kv_blocks_free", "KV pages without content.", "free_pages"),
        ("kv_blocks_cached", "KV pages that only the prefix cache holds.", "cached_pages"),
        ("kv_blocks_held", "KV pages that sequences hold.", "held_pages"),
        ("kv_host_blocks", "KV pages of the host tier.", "total_host_pages"),
        ("kv_host_blocks_free", "KV pages of the host tier without content.", "free_host_pages"),
        ("kv_host_blocks_cached", "KV pages of the host tier with content.", "cached_host_pages"),
        ("adapter_slots", "Adapter slots.", "num_slots"),
        ("adapter_memory_total_bytes", "Memory of a rank for adapters in slots; 0: no limit.",
         "adapter_memory"),
        ("adapter_slot_wait_bound_steps",
         "Steps that an adapter which joins the line for a slot now waits at most.",
         "slot_wait_bound"),
        ("adapter_slot_wait_longest_steps",
         "Steps that an adapter has waited for a slot at most so far.", "longest_slot_wait"),
        ("engine_ready", "1 if the ranks are up.", "ready"),
        ("engine_healthy", "1 if the ranks are up and make progress.", "healthy"),
        ("engine_step", "Number of the last step of this group of ranks.", "step"),
    )
)  # fmt: skip
COUNTERS = tuple(
    (counter(name, text, "replica"), field)
    for name, text, field in (
        ("preemptions", "Sequences whose pages were taken back.", "preemptions"),
        ("kv_blocks_evicted", "KV pages evicted from the prefix cache.", "evicted_pages"),
        ("kv_host_blocks_saved", "KV pages copied from device to host.", "saved_pages"),
        ("kv_host_blocks_restored", "KV pages copied from host to device.", "restored_pages"),
        ("kv_host_blocks_evicted", "KV pages evicted from the host tier.", "evicted_host_pages"),
        ("forked_sequences", "Sequences that began on the pages of another one of their prompt.",
         "forked_sequences"),
        ("adapter_loads", "Loads of an adapter into a slot that have begun.", "adapter_loads"),
        ("adapter_load_failures", "Loads into a slot that failed: requests ended with the reason.",
         "failed_adapter_loads"),
        ("adapter_slot_late_hand_overs",
         "Slots that an adapter got later than the bound on its wait was when it joined the line.",
         "late_hand_overs"),
        ("adapter_slot_evictions", "Adapters that another one put out of its slot.",
         "adapter_evictions"),
        ("tp_group_restarts", "Restarts of the group of ranks.", "restarts"),
        ("engine_steps_ahead", "Steps whose plan was sent while the ranks ran the one before.",
         "steps_ahead"),
        ("engine_prompt_tokens", "Prompt tokens of admitted sequences.", "prompt_tokens"),
        ("engine_cached_prompt_tokens", "Prompt tokens found in the prefix cache.",
         "cached_prompt_tokens"),
        ("engine_generation_tokens", "Tokens sampled.", "generated_tokens"),
    )
)  # fmt: skip
FAILURES = counter(
    "tp_group_failures", "Groups of ranks that were given up, by reason.", "replica", "reason"
)
KV_USAGE = gauge("kv_cache_usage_ratio", "Share of KV pages that sequences hold.", "replica")
SLOTS_USED = gauge("adapter_slots_used", "Adapter slots that are occupied.", "replica")
CLAIMED = gauge(
    "adapter_memory_claimed_bytes",
    "Most that adapters in slots may hold, on the rank that holds most.",
    "replica",
)
HELD = gauge(
    "adapter_memory_held_bytes",
    "Bytes that adapters in slots do hold, on the rank that holds most.",
    "replica",
)
ALIVE = gauge("tp_ranks_alive", "Ranks whose process lives.", "replica")
STEP = histogram(
    "step_seconds",
    "Parts of a step: making the plan, what the ranks take from plan to answer, taking it in.",
    STEP_BUCKETS,
    "replica",
    "phase",
)
PHASES = ("plan", "ranks", "commit")
HISTOGRAMS = (
    histogram("queue_time_seconds", "From a sequence's arrival to its first plan.",
              TTFT_BUCKETS, "replica"),
    histogram("prefill_time_seconds", "From a sequence's first plan to its first token.",
              TTFT_BUCKETS, "replica"),
    histogram("decode_time_seconds", "From a sequence's first token to its end.",
              E2E_BUCKETS, "replica"),
    histogram("adapter_load_seconds", "From the begin of a load into a slot until all ranks have "
              "it; host memory or disk included.", LOAD_BUCKETS, "replica"),
    histogram("batch_size", "Sequences in a step.", COUNT_BUCKETS, "replica"),
    histogram("adapters_per_batch", "Adapters in a step, the base model not counted.",
              COUNT_BUCKETS, "replica"),
)  # fmt: skip
RANKS = tuple(
    (gauge(name, text, "replica", "rank"), field)
    for name, text, field in (
        ("rank_last_step_age_seconds",
         "Time since a rank's last step while one is awaited, else 0.", "last_step_age"),
        ("rank_weight_bytes", "Bytes of a rank's weights.", "weight_bytes"),
        ("rank_kv_bytes", "Bytes of a rank's KV pages.", "kv_bytes"),
    )
)  # fmt: skip


def scheduler_families(reports: Sequence[Report]) -> Iterator[Metric]:
    """Yield what replicas report; one that does not answer has `scheduler_up` alone."""
    statuses = [report.status for report in reports if report.status is not None]
    yield UP.metric(((report.replica,), report.status is not None) for report in reports)
    for family, field in (*GAUGES, *COUNTERS):
        yield family.metric(((s.replica,), getattr(s, field)) for s in statuses)
    yield FAILURES.metric(
        ((s.replica, reason), count) for s in statuses for reason, count in s.failures.items()
    )
    yield from _derived(statuses)
    yield STEP.histogram(
        ((s.replica, phase), s.histograms[f"step_seconds/{phase}"])
        for s in statuses
        for phase in PHASES
        if f"step_seconds/{phase}" in s.histograms
    )
    for family in HISTOGRAMS:
        yield family.histogram(
            ((s.replica,), s.histograms[family.name])
            for s in statuses
            if family.name in s.histograms
        )
    for family, field in RANKS:
        yield family.metric(
            ((s.replica, str(rank.rank)), getattr(rank, field))
            for s in statuses
            for rank in s.ranks
        )


def _derived(statuses: Sequence[Status]) -> Iterator[Metric]:
    yield KV_USAGE.metric(((s.replica,), kv_usage([s])) for s in statuses)
    yield SLOTS_USED.metric(((s.replica,), len(s.slots)) for s in statuses)
    yield CLAIMED.metric(
        ((s.replica,), sum(slot.claimed_bytes for slot in s.slots)) for s in statuses
    )
    yield HELD.metric(((s.replica,), sum(slot.held_bytes for slot in s.slots)) for s in statuses)
    yield ALIVE.metric(((s.replica,), sum(rank.alive for rank in s.ranks)) for s in statuses)


def kv_usage(statuses: Sequence[Status]) -> float:
    """Return the share of all KV pages that sequences hold."""
    return sum(s.held_pages for s in statuses) / max(1, sum(s.total_pages for s in statuses))
