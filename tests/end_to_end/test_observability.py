"""What a real server of two ranks tells: spans that a collector gets, and vLLM's metrics."""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.demo.many_adapters import make_many
from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import title
from tests.end_to_end.server import Server
from tests.end_to_end.test_server_adapter_life import load, unload
from tests.otlp_receiver import SERVER, Receiver, SentSpan
from tests.patience import PATIENCE

pytestmark = [pytest.mark.model, pytest.mark.ray]

PARENT = "00f067aa0ba902b7"


@pytest.fixture
def fresh(victim: Server, tmp_path: Path) -> Iterator[str]:
    """The name of an adapter that nobody has asked for."""
    (folder,) = make_many(tmp_path, 1)
    assert load(victim, "fresh", folder).status_code == 200
    yield "fresh"
    assert unload(victim, "fresh").status_code == 200


def streamed(
    server: Server, model: str, trace: str, max_tokens: int, strike: int | None = None
) -> list[dict[str, Any]]:
    """Return the chunks of a stream, in which a process is killed behind the first one."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is a graft?"}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
    chunks: list[dict[str, Any]] = []
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
                if strike is not None and len(chunks) == 4:
                    os.kill(strike, signal.SIGKILL)
                    strike = None
    return chunks


def spans_of(receiver: Receiver, trace: str) -> list[SentSpan]:
    """Return the spans of a trace when that of its call is there."""

    def has_call(spans: list[SentSpan]) -> bool:
        return any((span.trace_id, span.kind) == (trace, SERVER) for span in spans)

    return [span for span in receiver.wait(has_call) if span.trace_id == trace]


def count(server: Server, name: str) -> float:
    """Return the sum over all labels of a metric, nothing where nothing was counted yet."""
    found = server.metrics().items()
    return sum(value for key, value in found if key.partition("{")[0] == name)


def only(spans: list[SentSpan], name: str) -> SentSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_a_call_is_seen_from_its_caller_to_its_ranks(
    victim: Server, receiver: Receiver, fresh: str
) -> None:
    trace = "a" * 32
    chunks = streamed(victim, fresh, trace, max_tokens=20)
    spans = spans_of(receiver, trace)
    call = only(spans, f"chat {fresh}")
    assert (call.parent_id, call.kind) == (PARENT, SERVER)
    assert len(spans) == 9
    request = only(spans, "scheduler.request")
    for name in ("resolve_adapter", "render_template", "tokenize"):
        part = only(spans, name)
        assert call.holds(part), name
        assert part.end <= request.start
    assert call.holds(request)
    queue = only(spans, "scheduler.queue")
    prefill, decode = only(spans, "ranks.prefill"), only(spans, "ranks.decode")
    assert all(request.holds(part) for part in (queue, prefill, decode))
    assert queue.end == prefill.start < prefill.end == decode.start < decode.end
    assert queue.holds(only(spans, "scheduler.adapter_load"))
    said, usage = call.attributes, chunks[-1]["usage"]
    assert said["gen_ai.response.id"] == chunks[0]["id"]
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 20
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["topwork.adapter.name"] == fresh
    assert re.fullmatch("[0-9a-f]{64}", said["topwork.adapter.digest"])
    assert prefill.attributes["topwork.steps"] >= 1
    assert decode.attributes["topwork.steps"] == 19
    spent, decoding = (part.attributes["topwork.rank_seconds"] for part in (prefill, decode))
    assert 0 < spent <= (prefill.end - prefill.start) / 1e9
    # The first step of these may begin before the scheduler has seen what the one before it drew.
    assert 0 < decoding <= (decode.end - prefill.start) / 1e9 - spent
    assert request.attributes["topwork.preemptions"] == 0
    assert request.attributes["topwork.recoveries"] == 0
    assert call.resource["service.name"] == "topwork"


@pytest.mark.slow  # `make test-servers`
def test_a_trace_goes_on_when_a_rank_dies_and_health_tells_of_it(
    victim: Server, receiver: Receiver
) -> None:
    trace = "b" * 32
    restarts = count(victim, "topwork_tp_group_restarts_total")
    with ThreadPoolExecutor(1) as client:
        rank = victim.rank_pids()[0]
        asked = client.submit(streamed, victim, "smollm2", trace, max_tokens=60, strike=rank)
        wait_for(lambda: victim.get("/health").status_code == 503)
        chunks = asked.result()
    assert chunks[-1]["usage"]["completion_tokens"] == 60
    spans = spans_of(receiver, trace)
    request = only(spans, "scheduler.request")
    assert only(spans, "chat smollm2").holds(request)
    assert request.attributes["topwork.recoveries"] == 1
    assert not any(span.is_error for span in spans)
    wait_for(victim.is_healthy)
    wait_for(lambda: count(victim, "topwork_tp_group_restarts_total") > restarts)


def test_a_trace_goes_on_when_its_scheduler_dies(victim: Server, receiver: Receiver) -> None:
    trace = "c" * 32
    (scheduler,) = [pid for pid in victim.processes() if ":Scheduler" in title(pid)]
    chunks = streamed(victim, "smollm2", trace, max_tokens=60, strike=scheduler)
    assert chunks[-1]["usage"]["completion_tokens"] == 60
    spans = spans_of(receiver, trace)
    call = only(spans, "chat smollm2")
    assert [name for name, _ in call.events] == ["topwork.scheduler_lost", "topwork.resubmitted"]
    before, after = sorted(
        (span for span in spans if span.name == "scheduler.request"), key=lambda span: span.start
    )
    assert (before.is_error, after.is_error, call.is_error) == (True, False, False)
    assert call.holds(before)
    assert call.holds(after)
    assert after.attributes["topwork.output_tokens_before"] >= 3


def test_vllms_metrics_count_what_was_served(victim: Server) -> None:
    names = [f"vllm:{name}" for name in ("generation_tokens_total", "prompt_tokens_total")]
    names += ["vllm:request_success_total", "vllm:iteration_tokens_total_count"]
    parts = ("queue", "prefill", "decode", "inference")
    names += [f"vllm:request_{name}_time_seconds_count" for name in parts]
    before = {name: count(victim, name) for name in names}
    asked = streamed(victim, "smollm2", "d" * 32, max_tokens=10)
    usage = asked[-1]["usage"]
    grown = {name: count(victim, name) - before[name] for name in names}
    assert grown.pop("vllm:generation_tokens_total") == usage["completion_tokens"] == 10
    assert grown.pop("vllm:iteration_tokens_total_count") >= 10
    assert grown.pop("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert set(grown.values()) == {1}, grown
    sums = [
        victim.metric(f"vllm:request_{name}_time_seconds_sum") for name in ("prefill", "decode")
    ]
    whole = victim.metric("vllm:request_inference_time_seconds_sum")
    assert whole == pytest.approx(sum(sums))
