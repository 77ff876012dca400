"""The series of scheduler replicas and their ranks, out of what they report.

Most are made from the annotations of the messages' own fields. A counter outlives the ranks of its
replica; when the replica's own process ends it begins at zero again, under the same label.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import get_type_hints

from msgspec import Meta, Struct
from prometheus_client.core import Metric

from cluster.histogram import (
    COUNT_BUCKETS,
    E2E_BUCKETS,
    LOAD_BUCKETS,
    PREEMPTIONS_BUCKETS,
    STEP_BUCKETS,
    STEP_TOKENS_BUCKETS,
    WAIT_BUCKETS,
)
from cluster.messages import EngineCounters, RankStatus, Status
from cluster.router.metrics.families import Family, counter, gauge, histogram
from cluster.router.replica_set import Report
from cluster.scheduler.stats import SchedulerCounters, SchedulerStats

UP = gauge("scheduler_up", "1 if the scheduler answers.", "replica")


def _of_fields(
    struct: type[Struct], make: Callable[..., Family], *labels: str
) -> tuple[tuple[Family, str], ...]:
    """Return (family, field) for each field of a message that is annotated as a metric."""
    return tuple(
        (make(meta.title, meta.description, *labels), name)
        for name, hint in get_type_hints(struct, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if isinstance(meta, Meta)
    )


GAUGES = _of_fields(SchedulerStats, gauge, "replica")
STATUS_GAUGES = _of_fields(Status, gauge, "replica")
COUNTERS = _of_fields(SchedulerCounters, counter, "replica")
ENGINE_COUNTERS = _of_fields(EngineCounters, counter, "replica")
RANKS = _of_fields(RankStatus, gauge, "replica", "rank")
FAILURES = counter(
    "tp_group_failures", "Groups of ranks that were given up, by reason.", "replica", "reason"
)
KV_USAGE = gauge(
    "kv_cache_usage_ratio", "Share of KV pages that sequences hold, of the scarcer kind.", "replica"
)
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
              WAIT_BUCKETS, "replica"),
    histogram("prefill_time_seconds", "From a sequence's first plan to its first token.",
              WAIT_BUCKETS, "replica"),
    histogram("decode_time_seconds", "From a sequence's first token to its end.",
              E2E_BUCKETS, "replica"),
    histogram("inference_time_seconds", "From a sequence's first plan to its end.",
              E2E_BUCKETS, "replica"),
    histogram("request_num_preemptions", "How often a sequence's pages were taken back till its "
              "end.", PREEMPTIONS_BUCKETS, "replica"),
    histogram("stream_pause_seconds", "From the last answer of ranks that were lost to the next "
              "token of a stream that they had.", E2E_BUCKETS, "replica"),
    histogram("adapter_load_seconds", "From the begin of a load into a slot until all ranks have "
              "it; host memory or disk included.", LOAD_BUCKETS, "replica"),
    histogram("batch_size", "Sequences in a step.", COUNT_BUCKETS, "replica"),
    histogram("iteration_tokens", "Tokens that a step computes.", STEP_TOKENS_BUCKETS, "replica"),
    histogram("adapters_per_batch", "Adapters in a step, the base model not counted.",
              COUNT_BUCKETS, "replica"),
)  # fmt: skip


def scheduler_families(reports: Sequence[Report]) -> Iterator[Metric]:
    """Yield what replicas report; one that does not answer has `scheduler_up` alone."""
    statuses = [report.status for report in reports if report.status is not None]
    yield UP.metric(((report.replica,), report.status is not None) for report in reports)
    for families, messages in (
        (GAUGES, [s.scheduler for s in statuses]),
        (STATUS_GAUGES, statuses),
        (COUNTERS, [s.scheduler.counters for s in statuses]),
        (ENGINE_COUNTERS, [s.engine for s in statuses]),
    ):
        for family, field in families:
            values = [getattr(message, field) for message in messages]
            yield family.metric(
                ((s.replica,), value) for s, value in zip(statuses, values, strict=True)
            )
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
    yield SLOTS_USED.metric(((s.replica,), len(s.scheduler.slots)) for s in statuses)
    yield CLAIMED.metric(
        ((s.replica,), sum(slot.claimed_bytes for slot in s.scheduler.slots)) for s in statuses
    )
    yield HELD.metric(
        ((s.replica,), sum(slot.held_bytes for slot in s.scheduler.slots)) for s in statuses
    )
    yield ALIVE.metric(((s.replica,), sum(rank.alive for rank in s.ranks)) for s in statuses)


def kv_usage(statuses: Sequence[Status]) -> float:
    """Return the share of all KV pages that sequences hold, of the scarcer kind."""
    stats = [status.scheduler for status in statuses]
    full = sum(s.held_pages for s in stats) / max(1, sum(s.total_pages for s in stats))
    num_window = sum(s.total_window_pages for s in stats)
    return max(full, sum(s.held_window_pages for s in stats) / max(1, num_window))
