"""What the dashboards show: rows of panels, each with its queries and what they mean.

Owns which question each row answers: is it healthy, how fast, how full, who waits, which adapters.
"""

from dataclasses import dataclass
from typing import Literal

from deploy.observability.queries import (
    INFERENCE,
    largest,
    mean,
    now,
    or_zero,
    quantile,
    rate,
    ratio,
    top,
    total,
)

Kind = Literal["timeseries", "stat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; `queries` are (legend, expression)."""

    title: str
    text: str  # what it tells, and what to do about it
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"  # as Grafana names units
    kind: Kind = "timeseries"
    fills_on: str = ""  # a fault or setting without which there is nothing to show


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that answer one question."""

    title: str
    panels: tuple[Panel, ...]


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"p{share * 100:g}", quantile(share, name)) for share in (0.5, 0.95, 0.99))


CALLS = rate("http_requests_total", INFERENCE)
FAILED_CALLS = rate("http_requests_total", f'{INFERENCE}, code=~"5.."')

HEALTHY = Row("Is it healthy?", (
    Panel(title="Replicas that serve", kind="stat", queries=(
        ("ready", total(now("engine_ready"))), ("known", total(f"1 + 0 * {now('scheduler_up')}"))),
        text="Schedulers whose ranks are up, and all that are known. None ready: every request is "
        "answered 503."),
    Panel(title="Routers and pool", kind="stat", queries=(
        ("routers", total(now("router_up"))), ("adapter pool", largest(now("adapter_pool_up")))),
        text="Without the adapter pool the base model is served, and adapters in slots are not "
        "resolved any more."),
    Panel(title="Ranks alive", kind="stat", queries=(
        ("ranks", total(now("tp_ranks_alive"))),),
        text="Processes of all groups. A group is restarted as a whole."),
    Panel(title="Alerts that fire", kind="stat", queries=(
        ("alerts", 'count(ALERTS{alertname=~"Topwork.+", alertstate="firing"}) or vector(0)'),),
        text="Of rules/alerts.yaml, where Prometheus has loaded them; the runbook line of each "
        "says what to look at."),
    Panel(title="Calls that failed", unit="percentunit", queries=(
        ("of all calls", ratio(total(or_zero(FAILED_CALLS, CALLS)), total(CALLS))),),
        text="Inference answered with 5xx. The objective is 99.9 % without."),
    Panel(title="Responses by status", unit="reqps", queries=(
        ("{{code}}", total(CALLS, "code")),),
        text="Inference only. 429: a limit is reached; 499: the client had gone."),
    Panel(title="Answers by how they ended", unit="reqps", queries=(
        ("{{finish_reason}}", total(rate("requests_total"), "finish_reason")),),
        text="stop and length are good ends; a name with a capital is that of an error."),
    Panel(title="Lost on the way", unit="reqps", queries=(
        ("broken streams", total(rate("broken_streams_total"))),
        ("clients gone", total(rate("client_disconnects_total")))),
        text="Broken streams were begun and ended with an error: look at the ranks' failures."),
    Panel(title="Age of a rank's last step", unit="s", queries=(
        ("{{replica}}/{{rank}}", largest(now("rank_last_step_age_seconds"), "replica", "rank")),),
        text="While a step is awaited. At step_timeout the whole group is restarted."),
    Panel(title="Groups of ranks given up", queries=(
        ("{{replica}} {{reason}}", largest(now("tp_group_failures_total"), "replica", "reason")),),
        text="Since the scheduler began. plan_mismatch: a rank was told another plan than the "
        "digest chain says; keep the record and tell the developers."),
))  # fmt: skip
FAST = Row("How fast?", (
    Panel(title="Time to first token", unit="s", queries=_quantiles("time_to_first_token_seconds"),
        text="From a call's arrival at a router. The objective is 95 % within 2.5 s."),
    Panel(title="Between tokens", unit="s", queries=_quantiles("inter_token_latency_seconds"),
        text="Of one answer, as a router sees them."),
    Panel(title="Whole answers", unit="s", queries=_quantiles("e2e_request_latency_seconds"),
        text="From arrival to end; grows with the length of answers."),
    Panel(title="Time per token", unit="s",
        queries=_quantiles("time_per_output_token_seconds"),
        text="An answer's mean after its first token."),
    Panel(title="Where the time goes (p95)", unit="s", queries=(
        ("queue", quantile(0.95, "queue_time_seconds")),
        ("prefill", quantile(0.95, "prefill_time_seconds")),
        ("decode", quantile(0.95, "decode_time_seconds"))),
        text="Queue: more replicas, or more max_num_seqs. Prefill: shorter or cached prompts."),
    Panel(title="A step", unit="s", queries=(
        ("{{phase}} p50", quantile(0.5, "step_seconds", "phase")),
        ("{{phase}} p99", quantile(0.99, "step_seconds", "phase"))),
        text="plan and commit are the scheduler's own; ranks is the forward pass with all that "
        "goes between processes."),
    Panel(title="Tokens per second", queries=(
        ("generated", total(rate("engine_generation_tokens_total"))),
        ("prompt, computed", total(rate("engine_prompt_tokens_total"))
            + " - " + total(rate("engine_cached_prompt_tokens_total"))),
        ("prompt, cached", total(rate("engine_cached_prompt_tokens_total")))),
        text="Over all replicas."),
    Panel(title="Steps planned ahead", unit="percentunit", queries=(
        ("share", ratio(total(rate("engine_steps_ahead_total")),
                        total(rate("step_seconds_count", 'phase="plan"')))),),
        text="Whose plan the ranks had before they ended the step before it. 0 where planning "
        "would take a core from them, or where somebody must give way to another."),
    Panel(title="Sequences in a step", queries=(
        ("mean", mean("batch_size")), ("p95", quantile(0.95, "batch_size"))),
        text="More of them share one pass over the weights."),
))  # fmt: skip
FULL = Row("How full?", (
    Panel(title="KV pages in use", unit="percentunit", queries=(
        ("{{replica}}", largest(now("kv_cache_usage_ratio"), "replica")),),
        text="Held by running sequences. Near 100 % with waiting requests, sequences are "
        "preempted: give more kv_cache_memory, or kv_host_memory."),
    Panel(title="KV pages by state", queries=(
        ("held", total(now("kv_blocks_held"))), ("cached", total(now("kv_blocks_cached"))),
        ("free", total(now("kv_blocks_free")))),
        text="Cached ones can be evicted at any time."),
    Panel(title="Prompt tokens found in the cache", unit="percentunit", queries=(
        ("hits", ratio(total(rate("engine_cached_prompt_tokens_total")),
                       total(rate("engine_prompt_tokens_total")))),),
        text="Of the prompts that were admitted."),
    Panel(title="Preemptions and evictions per second", queries=(
        ("sequences preempted", total(rate("preemptions_total"))),
        ("pages evicted", total(rate("kv_blocks_evicted_total")))),
        text="A preempted sequence is resumed later; what was evicted of it is computed again."),
    Panel(title="Host tier of KV pages", queries=(
        ("cached", total(now("kv_host_blocks_cached"))),
        ("saved per s", total(rate("kv_host_blocks_saved_total"))),
        ("restored per s", total(rate("kv_host_blocks_restored_total"))),
        ("evicted per s", total(rate("kv_host_blocks_evicted_total")))),
        text="All zero without kv_host_memory."),
    Panel(title="Memory of a rank", unit="bytes", queries=(
        ("weights {{replica}}/{{rank}}", largest(now("rank_weight_bytes"), "replica", "rank")),
        ("KV {{replica}}/{{rank}}", largest(now("rank_kv_bytes"), "replica", "rank"))),
        text="What weights and KV pages take."),
))  # fmt: skip
WAITING = Row("Who waits?", (
    Panel(title="Sequences", queries=(
        ("running", total(now("requests_running"))), ("waiting", total(now("requests_waiting"))),
        ("of these, for an adapter", total(now("requests_waiting_for_adapter")))),
        text="Waiting for an adapter: for a slot, or until it is loaded."),
    Panel(title="Oldest in the queue", unit="s", queries=(
        ("{{replica}}", largest(now("queue_age_seconds"), "replica")),),
        text="That has never run. Grows without end: the replica makes no progress."),
    Panel(title="Time in the queue", unit="s", queries=_quantiles("queue_time_seconds"),
        text="Until the first plan."),
    Panel(title="Refused, per second", unit="reqps", queries=(
        ("{{reason}}", total(rate("rejections_total"), "reason")),),
        text="router_in_flight and scheduler_queue are answered 429."),
    Panel(title="Waits for a slot, in steps", queries=(
        ("longest so far, {{replica}}",
         largest(now("adapter_slot_wait_longest_steps"), "replica")),
        ("bound for who comes now, {{replica}}",
         largest(now("adapter_slot_wait_bound_steps"), "replica"))),
        text="No adapter waits longer than the bound was when it came, unless loads have become "
        "slower since or slots were pinned: those are counted under Loads and evictions."),
    Panel(title="Answers in flight by router", queries=(
        ("{{router}}", largest(now("router_inflight"), "router")),),
        text="Uneven: the load balancer's doing."),
))  # fmt: skip
ADAPTERS = Row("Which adapters?", (
    Panel(title="Answers by adapter", unit="reqps", queries=(
        ("{{adapter}}", top(20, total(rate("requests_total"), "adapter"))),),
        text="The 20 most asked for. _other: all over the cap on labels."),
    Panel(title="Tokens by adapter", queries=(
        ("{{adapter}}", top(20, total(rate("generation_tokens_total"), "adapter"))),),
        text="Generated per second; counted when an answer ends."),
    Panel(title="Mean time to first token by adapter", unit="s", queries=(
        ("{{adapter}}", top(20, ratio(total(rate("first_token_wait_seconds_total"), "adapter"),
                                      total(rate("first_tokens_total"), "adapter")))),),
        text="An adapter far above the others waits for a slot."),
    Panel(title="Prompt tokens found in the cache by adapter", unit="percentunit", queries=(
        ("{{adapter}}", top(20, ratio(total(rate("cached_prompt_tokens_total"), "adapter"),
                                      total(rate("prompt_tokens_total"), "adapter")))),),
        text="An adapter's prompts share pages with each other alone."),
    Panel(title="Failed answers by adapter", unit="reqps", queries=(
        ("{{adapter}} {{finish_reason}}", total(
            rate("requests_total", 'finish_reason=~"[A-Z].*|error"'), "adapter", "finish_reason")),
        ), text="By error.", fills_on="a request that has failed"),
    Panel(title="Running with an adapter", queries=(
        ("{{adapter}}", top(20, largest(now("adapter_inflight"), "adapter"))),),
        text="Sequences that hold it."),
))  # fmt: skip
PLACES = Row("Where are they?", (
    Panel(title="Registered, by the best place", queries=(
        ("{{level}}", largest(now("adapters_registered"), "level")),),
        text="device: in a slot; gone: the directory holds something else by now."),
    Panel(title="In a slot now", queries=(
        ("{{adapter}}", largest(now("adapter_resident", 'level="device"'), "adapter")),),
        text="Requests for these need no load."),
    Panel(title="Slots", queries=(
        ("used, {{replica}}", largest(now("adapter_slots_used"), "replica")),
        ("all, {{replica}}", largest(now("adapter_slots"), "replica"))),
        text="--max-loras of each replica."),
    Panel(title="Loads and evictions per second", queries=(
        ("loads", total(rate("adapter_loads_total"))),
        ("evictions from slots", total(rate("adapter_slot_evictions_total"))),
        ("failed loads", total(rate("adapter_load_failures_total"))),
        ("slots handed over late", total(rate("adapter_slot_late_hand_overs_total"))),
        ("evictions from host memory", largest(rate("adapter_host_evictions_total")))),
        text="Many evictions beside few answers: more slots, or more replicas."),
    Panel(title="A load into a slot", unit="s", queries=_quantiles("adapter_load_seconds"),
        text="From the decision until all ranks have it."),
    Panel(title="Reading an adapter", unit="s", queries=(
        ("p95", quantile(0.95, "adapter_read_seconds")),),
        text="From disk to shards in host memory; a first request waits for it."),
    Panel(title="Reads per second", queries=(
        ("{{result}}", largest(rate("adapter_reads_total"), "result")),),
        text="failed: a directory that cannot be served; the pool's log names it."),
    Panel(title="Memory", unit="bytes", queries=(
        ("claimed in slots, {{replica}}",
         largest(now("adapter_memory_claimed_bytes"), "replica")),
        ("held in slots, {{replica}}", largest(now("adapter_memory_held_bytes"), "replica")),
        ("all for slots, {{replica}}", largest(now("adapter_memory_total_bytes"), "replica")),
        ("held in host memory", largest(now("adapter_host_memory_held_bytes"))),
        ("host memory", largest(now("adapter_host_memory_total_bytes")))),
        text="Of the rank that holds most."),
    Panel(title="Adapters in a step", queries=(
        ("mean", mean("adapters_per_batch")), ("p95", quantile(0.95, "adapters_per_batch"))),
        text="The base model not counted."),
))  # fmt: skip
