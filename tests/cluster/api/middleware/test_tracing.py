"""Calls as spans: a router over fake schedulers, OpenTelemetry's SDK, and a collector."""

import string
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster.errors import ErrorInfo
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.otlp_receiver import ENVIRONMENT, SERVER, Receiver, SentSpan, receiving
from tests.patience import PATIENCE

CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{CALLER}-{PARENT}-01", "tracestate": "vendor=a:b"}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def traced(serve: Callable[..., Any], receiver: Receiver) -> Callable[..., Any]:
    """Return a function that serves given schedulers and sends traces to `receiver`."""

    def start(*schedulers: FakeScheduler, **changes: Any) -> Any:
        return serve(*schedulers, otlp_traces_endpoint=receiver.url, **changes)

    return start


def post(serving: Any, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{serving.url}{path}", json=body, headers=headers, timeout=PATIENCE)


def chat(serving: Any, *, model: str = "tiny", **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "a secret question"}]
    body = {"model": model, "messages": messages, "max_tokens": 3, **more}
    return post(serving, "/v1/chat/completions", body, **HEADERS)


def root(spans: list[SentSpan]) -> SentSpan:
    (found,) = [span for span in spans if span.kind == SERVER]
    return found


def named(spans: list[SentSpan], name: str) -> SentSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_a_call_is_a_child_of_its_caller_and_its_parts_are_within_it(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    serving = traced(FakeScheduler())
    reply = chat(serving, temperature=0.5, top_p=0.9, top_k=7, seed=11, frequency_penalty=0.25)
    assert reply.status_code == 200, reply.text
    spans = receiver.wait_for_calls(1)
    call = root(spans)
    assert (call.trace_id, call.parent_id, call.trace_state) == (CALLER, PARENT, "vendor=a:b")
    assert {span.trace_id for span in spans} == {CALLER}
    assert call.name == "chat tiny"
    answer = named(spans, "scheduler.request")
    for name in ("render_template", "tokenize"):
        assert call.holds(named(spans, name)), name
        assert named(spans, name).end <= answer.start
    assert call.holds(answer)
    parts = [
        named(spans, f"{part}") for part in ("scheduler.queue", "ranks.prefill", "ranks.decode")
    ]
    assert all(answer.holds(part) for part in parts)
    assert parts[0].end == parts[1].start
    assert parts[1].end == parts[2].start
    assert len(spans) == 7
    usage = reply.json()["usage"]
    said = call.attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.provider.name"] == "topwork"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny"
    assert said["gen_ai.request.max_tokens"] == 3
    assert said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.request.top_p"] == 0.9
    assert said["gen_ai.request.top_k"] == 7
    assert said["gen_ai.request.seed"] == 11
    assert said["gen_ai.request.frequency_penalty"] == 0.25
    assert "gen_ai.request.presence_penalty" not in said
    assert said["gen_ai.response.id"] == reply.json()["id"]
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == 3
    assert said["http.request.method"] == "POST"
    assert said["http.route"] == "/v1/chat/completions"
    assert said["http.response.status_code"] == 200
    first, whole = said["gen_ai.latency.time_to_first_token"], said["gen_ai.latency.e2e"]
    assert 0 < first <= whole <= (call.end - call.start) / 1e9 + 1e-3
    assert said["gen_ai.latency.time_in_model_inference"] == pytest.approx(
        said["gen_ai.latency.time_in_model_prefill"] + said["gen_ai.latency.time_in_model_decode"]
    )
    assert not any(span.is_error for span in spans)
    assert call.resource["service.name"] == "topwork"
    assert call.resource["service.version"] == "1.2.3"
    assert call.resource["service.instance.id"] == serving.router.router_id


def test_nothing_that_was_asked_or_answered_is_in_a_span(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    # Letters past f: an id of a request, in hexadecimal, may hold any other three.
    serving = traced(FakeScheduler(lambda _: Script(tokens=(80, 81, 82, 83))))
    reply = chat(serving, stop=["a secret stop"])
    text = reply.json()["choices"][0]["message"]["content"]
    assert not set(text) & set(string.hexdigits)
    spans = receiver.wait_for_calls(1)
    values = [
        value
        for span in spans
        for value in (span.name, *map(str, span.attributes.values()), str(span.events))
    ]
    assert text
    assert not [value for value in values if "secret" in value or text in value]


def test_a_stream_is_a_span_until_its_end_and_an_adapter_is_named(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    serving = traced(FakeScheduler())
    serving.run(serving.backend.load("sql", "/a/sql", False, False))
    reply = chat(serving, model="sql", stream=True, n=2)
    assert reply.text.endswith("data: [DONE]\n\n")
    spans = receiver.wait_for_calls(1)
    call = root(spans)
    assert call.name == "chat sql"
    assert call.attributes["gen_ai.request.stream"] is True
    assert call.attributes["gen_ai.request.choice.count"] == 2
    assert call.attributes["topwork.adapter.name"] == "sql"
    digest = serving.schedulers[0].submitted[0].adapter
    assert call.attributes["topwork.adapter.digest"] == digest
    assert call.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert call.attributes["gen_ai.usage.output_tokens"] == 6
    assert call.holds(named(spans, "resolve_adapter"))
    answers = [span for span in spans if span.name == "scheduler.request"]
    assert sorted(span.attributes["topwork.answer.index"] for span in answers) == [0, 1]
    assert all(span.attributes["topwork.replica"] == "0" for span in answers)


def test_a_call_without_a_caller_begins_a_trace(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    serving = traced(FakeScheduler())
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}
    assert post(serving, "/v1/completions", body).status_code == 200
    call = root(receiver.wait_for_calls(1))
    assert call.parent_id == ""
    assert call.name == "text_completion tiny"
    assert call.attributes["gen_ai.usage.input_tokens"] == 2
    assert call.attributes["gen_ai.usage.output_tokens"] == 4


def test_what_the_caller_does_not_sample_has_no_spans_and_nor_have_other_calls(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    serving = traced(FakeScheduler())
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    unsampled = f"00-{CALLER}-{PARENT}-00"
    assert post(serving, "/v1/completions", body, traceparent=unsampled).status_code == 200
    assert httpx.get(f"{serving.url}/v1/models").status_code == 200
    assert post(serving, "/tokenize", {"model": "tiny", "prompt": "a"}).status_code == 200
    assert post(serving, "/v1/completions", body).status_code == 200
    spans = receiver.wait_for_calls(1)
    assert root(spans).parent_id == ""
    assert len({span.trace_id for span in spans}) == 1
    assert serving.schedulers[0].num_timed == 1


def test_a_traceparent_that_is_none_begins_a_trace(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    serving = traced(FakeScheduler())
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    for wrong in ("x", f"00-{'0' * 32}-{PARENT}-01", "00-\xff-1-01", f"ff-{CALLER}-{PARENT}-01"):
        headers = {"traceparent": wrong.encode("latin-1")}
        reply = httpx.post(f"{serving.url}/v1/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
    spans = receiver.wait_for_calls(4)
    calls = [span for span in spans if span.kind == SERVER]
    assert [call.parent_id for call in calls] == [""] * 4
    assert len({call.trace_id for call in calls}) == 4


def test_a_trace_goes_on_when_its_scheduler_is_lost(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    victim = FakeScheduler(lambda _: Script(dies_after=1), replica="victim")
    heir = FakeScheduler(replica="heir")
    serving = traced(victim)

    async def replace() -> None:
        serving.backend.addresses = (await heir.start(),)

    serving.schedulers.append(heir)
    victim._script = lambda _: Script(pauses_after=1)
    with httpx.stream(
        "POST",
        f"{serving.url}/v1/completions",
        json={"model": "tiny", "prompt": "a", "max_tokens": 4, "stream": True},
        headers=HEADERS,
        timeout=PATIENCE,
    ) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        serving.run(replace())
        serving.run(victim.close())
        assert [line for line in lines if line][-1] == "data: [DONE]"
    spans = receiver.wait_for_calls(1)
    call = root(spans)
    assert {span.trace_id for span in spans} == {CALLER}
    (lost, lost_said), (again, again_said) = call.events
    assert (lost, lost_said["topwork.replica"]) == ("topwork.scheduler_lost", "victim")
    assert lost_said["topwork.reason"] == "died"
    assert (again, again_said["topwork.replica"]) == ("topwork.resubmitted", "heir")
    assert not call.is_error
    before, after = sorted(
        (span for span in spans if span.name == "scheduler.request"), key=lambda span: span.start
    )
    assert call.holds(before)
    assert call.holds(after)
    assert (before.is_error, before.attributes["error.type"]) == (True, "died")
    assert not after.is_error
    assert after.attributes["topwork.output_tokens_before"] == 1
    assert call.attributes["gen_ai.usage.output_tokens"] == 4


def test_what_is_refused_or_fails_is_an_error_of_its_kind(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    error = ErrorInfo("Internal", "a secret of the scheduler")
    serving = traced(FakeScheduler(lambda _: Script(tokens=(), error=error)))
    assert chat(serving, temperature=-1).status_code == 400
    refused = root(receiver.wait_for_calls(1))
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.attributes["error.type"] == "400"
    assert not refused.is_error  # the client's, in the words of OpenTelemetry
    assert chat(serving).status_code == 500
    spans = receiver.wait_for_calls(2)
    failed = [span for span in spans if span.kind == SERVER][-1]
    assert failed.attributes["error.type"] == "Internal"
    assert failed.is_error
    assert named(spans, "scheduler.request").is_error


def test_names_and_numbers_of_any_size_can_be_sent(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    serving = traced(FakeScheduler())
    assert chat(serving, model="m" * 100_000).status_code == 404
    assert chat(serving, seed=2**63 - 1).status_code == 200
    calls = [span for span in receiver.wait_for_calls(2) if span.kind == SERVER]
    assert [call.name for call in calls] == ["chat " + "m" * 256, "chat tiny"]
    assert calls[1].attributes["gen_ai.request.seed"] == 2**63 - 1


def test_a_client_that_goes_away_cancels(traced: Callable[..., Any], receiver: Receiver) -> None:
    serving = traced(FakeScheduler(lambda _: Script(pauses_after=1)))
    with httpx.stream(
        "POST",
        f"{serving.url}/v1/completions",
        json={"model": "tiny", "prompt": "a", "max_tokens": 4, "stream": True},
        timeout=PATIENCE,
    ) as reply:
        next(reply.iter_lines())
    spans = receiver.wait_for_calls(1)
    assert root(spans).attributes["error.type"] == "cancelled"
    assert root(spans).holds(named(spans, "scheduler.request"))


def test_a_call_of_many_answers_has_spans_of_some_and_counts_all(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    serving = traced(FakeScheduler())
    body = {"model": "tiny", "prompt": ["a"] * 40, "max_tokens": 1}
    assert post(serving, "/v1/completions", body).status_code == 200
    spans = receiver.wait_for_calls(1)
    assert sum(span.name == "scheduler.request" for span in spans) == 16
    assert root(spans).attributes["gen_ai.usage.output_tokens"] == 40
    assert named(spans, "tokenize").attributes["topwork.count"] == 40


def test_a_response_in_the_background_is_a_span_until_it_is_there(
    traced: Callable[..., Any], receiver: Receiver
) -> None:
    serving = traced(FakeScheduler(lambda _: Script(pauses_after=1)))
    body = {"model": "tiny", "input": "a", "background": True, "max_output_tokens": 3}
    reply = post(serving, "/v1/responses", body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["status"] in ("queued", "in_progress")
    assert not receiver.spans
    serving.loop.call_soon_threadsafe(serving.schedulers[0].resume)
    spans = receiver.wait_for_calls(1)
    call = root(spans)
    assert call.attributes["gen_ai.response.id"] == reply.json()["id"]
    assert call.attributes["gen_ai.request.max_tokens"] == 3
    assert call.attributes["gen_ai.usage.output_tokens"] == 3
    assert call.holds(named(spans, "scheduler.request"))


def test_the_name_of_the_service_and_headers_come_from_the_environment(
    serve: Callable[..., Any], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "grafts")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    serving = serve(FakeScheduler(), otlp_traces_endpoint=receiver.url)
    assert chat(serving).status_code == 200
    assert root(receiver.wait_for_calls(1)).resource["service.name"] == "grafts"
    assert receiver.headers[0]["authorization"] == "Bearer x"


def test_without_an_endpoint_schedulers_are_asked_for_no_times(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    assert serving.router.tracer is None
    assert chat(serving).status_code == 200
    assert serving.schedulers[0].num_timed == 0
