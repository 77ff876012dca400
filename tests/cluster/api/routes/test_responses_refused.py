"""Hostile and mistaken calls of the Responses API, and answers that are scripted."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from cluster.errors import ErrorInfo
from cluster.request import Request
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.conftest import Serving
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE

Post = Callable[..., tuple[int, dict[str, Any]]]
ID = "resp_" + "0" * 48
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}

OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.fixture(scope="module")
def serving(serve_once: Callable[..., Serving]) -> Serving:
    return serve_once(FakeScheduler(), max_body_bytes=4_000_000)


@pytest.fixture
def post(serving: Serving) -> Post:
    """Return a function that posts a body and returns (status, error object)."""

    def send(**content: Any) -> tuple[int, dict[str, Any]]:
        reply = httpx.post(f"{serving.url}/v1/responses", timeout=PATIENCE, **content)
        assert not serving.schedulers[0].submitted
        return reply.status_code, reply.json()["error"]

    return send


def message(content: Any, **more: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": content, **more}]}


@pytest.mark.parametrize(
    ("change", "param", "reason"),
    [
        ({"input": 7}, "input", "a string or a list of items"),
        ({"input": None}, "input", "a string or a list of items"),
        ({"input": {}}, "input", "a string or a list of items"),
        ({"input": []}, "input", "1 to 16384 items"),
        ({"input": [[]] * 16385}, "input", "1 to 16384 items"),
        ({"input": ["a"]}, "input.0", "must be an object"),
        ({"input": [{"type": ["message"]}]}, "input.0.type", "only message, function_call"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type", "only message"),
        ({"input": [{"role": "king", "content": "a"}]}, "input.0.role", "one of user"),
        ({"input": [{"role": ["user"], "content": "a"}]}, "input.0.role", "one of user"),
        ({"input": [{"role": "user"}]}, "input.0.content", "a string or a list of parts"),
        (message([{"type": "input_image"}]), "input.0.content.0", "only parts of type input_text"),
        (message([{"type": {}}]), "input.0.content.0", "only parts of type input_text"),
        (message(["a"]), "input.0.content.0", "only parts of type input_text"),
        (message([{"type": "input_text"}]), "input.0.content.0.text", "must be a string"),
        (message([{"type": "input_text", "text": 1}]), "input.0.content.0.text", "a string"),
        (
            message([{"type": "input_text", "text": "a", "b": 1}]),
            "input.0.content.0.b",
            "not supported",
        ),
        (message("a", king=True), "input.0.king", "not supported"),
        ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments", "must be a string"),
        ({"input": [{**CALL, "name": ""}]}, "input.0.name", "1 to 256 characters"),
        ({"input": [{**CALL, "name": "x" * 257}]}, "input.0.name", "1 to 256 characters"),
        ({"input": [{**CALL, "call_id": None}]}, "input.0.call_id", "1 to 256 characters"),
        (
            {"input": [{**CALL, "arguments": "[" * 300_000}]},
            "input",
            "the arguments have more than 262144 values",
        ),
        (
            {"input": [{**OUTPUT, "output": 3}]},
            "input.0.output",
            "a string or a list of parts",
        ),
        (
            {"input": [{**CALL, "type": "function_call_output", "output": ""}]},
            "input.0.arguments",
            "",
        ),
        ({"instructions": []}, "instructions", "valid string"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 1000}, "max_tokens", "context length is 256 tokens"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"n": 2}, "n", "not a parameter of this call"),
        ({"stop": "a"}, "stop", "not a parameter of this call"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include="),
        ({"include": ["everything"]}, "include", "'everything' is not known"),
        ({"include": ["x"] * 17}, "include", "at most 16"),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "at most 512"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
        ({"truncation": "some"}, "truncation", "'auto' or 'disabled'"),
        ({"background": True, "store": False}, "background", "when `store` is true"),
        ({"background": "yes"}, "background", "valid boolean"),
        ({"previous_response_id": 7}, "previous_response_id", "valid string"),
        ({"previous_response_id": "x" * 100_000}, "previous_response_id", "not found"),
        ({"previous_response_id": ID}, "previous_response_id", "not found"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "does not tell it of tools"),
        ({"tools": 0}, "tools", "must be a list"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"text": {"format": "json"}}, "text.format", "must be an object of type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "must be an object of type"),
        ({"text": {"format": {"type": ["text"]}}}, "text.format", "must be an object of type"),
        ({"text": {"format": {"type": "text", "name": "n"}}}, "text.format.name", "with the type"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {}}}},
            "text.format.name",
            "is missing",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n"}}},
            "text.format.schema",
            "is missing",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "", "schema": {}}}},
            "text.format.name",
            "1 to 64",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": []}}},
            "text.format.schema",
            "must be of type dict",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "king"}}}},
            "text.format",
            "king",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "regex": "a"},
            "text.format",
            "one form only",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "min_tokens": 5},
            "min_tokens",
            "with text.format",
        ),
        ({"text": []}, "text", "must be an object"),
        ({"text": {"verbosity": "high"}}, "text.verbosity", "is not supported"),
        ({"text": {"sound": 1}}, "text.sound", "is not supported"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "no effort 'high'"),
        ({"conversation": "c"}, "conversation", "is not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
        ({"inputs": "a"}, "inputs", "is not a known parameter"),
        (
            {"stream": True, "stream_options": {"resumable": True}},
            "stream_options.resumable",
            "is not needed",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "is not supported",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "messages",
            "no tools here",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_mistake_is_named(post: Post, change: dict[str, Any], param: str, reason: str) -> None:
    status, error = post(json={"model": "tiny", "input": "hello", **change})
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert reason in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": ' + b"[" * 1_000_000,
        b'{"model": "tiny", "input": ' + b'[{"a":' * 100_000,
        b'{"model": "tiny", "input": [' + b"[]," * 1_000_000 + b"[]]}",
        b'{"model": "tiny", "input": [' + b"{}," * 1_000_000 + b"{}]}",
        b'{"model": "tiny", "input": "a", "x": [' + b"0," * 1_000_000 + b"0]}",
        b'{"model": "tiny", "input": "' + b'\\"' * 1_500_000,
        b'{"model": "tiny", "input": "\\ud800"}',
        b'{"model": "tiny", "input": "' + b"a" * 5_000_000 + b'"}',
        b'{"model": "tiny", "input": "' + b"a" * 3_900_000 + b'"}',
        b'"hello"',
        b"\xff",
        b"",
    ],
    ids=range(12),
)
def test_a_hostile_body_is_refused(post: Post, body: bytes) -> None:
    status, error = post(content=body)
    assert status == 400
    assert error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", f"/{'x' * 60_000}", 404),
        ("GET", f"/{ID}", 404),
        ("GET", f"/{ID.upper()}", 404),
        ("GET", "/resp_%00", 404),
        ("GET", f"/{ID}?stream=maybe", 400),
        ("GET", f"/{ID}?starting_after=1", 400),
        ("GET", f"/{ID}?stream=true&starting_after=-1", 400),
        ("GET", f"/{ID}?stream=true&starting_after={'9' * 1000}", 400),
        ("GET", f"/{ID}?stream=true&starting_after=٣", 400),
        ("POST", f"/{ID}/cancel", 404),
        ("DELETE", f"/{ID}", 404),
        ("PUT", f"/{ID}", 405),
    ],
    ids=range(12),
)
def test_what_is_not_there_or_makes_no_sense_is_told(
    serving: Serving, method: str, path: str, status: int
) -> None:
    reply = httpx.request(method, f"{serving.url}/v1/responses{path}", timeout=PATIENCE)
    assert reply.status_code == status, reply.text
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert len(reply.text) < 1000


def test_values_that_ask_for_nothing_are_taken(
    serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]
) -> None:
    serving = serve(FakeScheduler(lambda _: Script(tokens=saying("hi"))))
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": None},
        "include": ["reasoning.encrypted_content"],
        "parallel_tool_calls": True,
        "max_tool_calls": None,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "auto",
        "n": 1,
        "truncation": "disabled",
    }
    body = {"model": "tiny", "input": "hello", **neutral}
    reply = httpx.post(f"{serving.url}/v1/responses", json=body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text


def test_an_answer_that_ends_by_itself_is_completed(
    serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]
) -> None:
    script = Script(tokens=saying("hello 🌳 world"), num_cached_tokens=3)
    client = serve(FakeScheduler(lambda _: script)).client()
    response = client.responses.create(model="tiny", input="x")
    assert response.status == "completed"
    assert response.incomplete_details is None
    assert response.output_text == "hello 🌳 world"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 3
    with client.responses.stream(model="tiny", input="x") as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "hello 🌳 world"
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_log_probabilities_come_with_deltas_and_with_the_whole(
    serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]
) -> None:
    client = serve(FakeScheduler(lambda _: Script(tokens=saying("hello")))).client()
    ask: Any = {
        "model": "tiny",
        "input": "x",
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    whole = client.responses.create(**ask)
    item: Any = whole.output[0]
    shown = [entry.token for entry in item.content[0].logprobs if entry.token != "<|im_end|>"]
    assert "".join(shown) == "hello"
    assert all(len(entry.top_logprobs) == 2 for entry in item.content[0].logprobs)
    assert whole.top_logprobs == 2
    for event in client.responses.create(stream=True, **ask):
        if event.type == "response.output_text.delta":
            assert "".join(entry.token for entry in event.logprobs) == event.delta
    plain: Any = client.responses.create(model="tiny", input="x").output[0]
    assert plain.content[0].logprobs == []


def test_turns_and_instructions_reach_the_template(
    serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]
) -> None:
    serving = serve(FakeScheduler(lambda _: Script(tokens=saying("hi"))))
    items: Any = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        },
    ]
    serving.client().responses.create(model="tiny", input=items, instructions="i")
    (request,) = serving.schedulers[0].submitted
    prompt = serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)
    told = (("system", "i"), ("developer", "d"), ("user", "u"), ("assistant", "a"))
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in told)
    assert prompt == f"{expected}<|im_start|>assistant\n"


def test_an_error_before_the_first_event_is_a_status_and_later_an_event(
    serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]
) -> None:
    def script(request: Request) -> Script:
        error = ErrorInfo("Overloaded", "too much", retry_after=1)
        return Script(
            tokens=saying("hello", ends=False) if request.max_tokens > 9 else (), error=error
        )

    client = serve(FakeScheduler(script)).client()
    for streams in (False, True):
        with pytest.raises(openai.RateLimitError, match="too much"):
            client.responses.create(model="tiny", input="x", max_output_tokens=9, stream=streams)
    with pytest.raises(openai.RateLimitError, match="too much"):
        client.responses.create(model="tiny", input="x", max_output_tokens=9, background=True)
    events = list(
        client.responses.create(model="tiny", input="x", max_output_tokens=10, stream=True)
    )
    failed: Any = events[-1]
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert (failed.response.error.code, failed.response.error.message) == (
        "rate_limit_exceeded",
        "too much",
    )
    assert failed.response.output_text == "hello"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_in_the_background_goes_on_elsewhere_when_its_scheduler_dies(
    serve: Callable[..., Serving],
) -> None:
    first = FakeScheduler(lambda _: Script(dies_after=3), replica="0")
    second = FakeScheduler(lambda _: Script(is_silent=True), replica="1")
    serving = serve(first)
    body = {"model": "tiny", "input": "hello", "background": True, "max_output_tokens": 9}
    assert httpx.post(f"{serving.url}/v1/responses", json=body, timeout=PATIENCE).status_code == 200
    serving.schedulers.append(second)
    serving.backend.addresses = (*serving.backend.addresses, serving.run(second.start()))
    wait_for(lambda: bool(second.submitted))
    (request,) = second.submitted
    assert len(request.output_token_ids) == 3


def test_with_truncation_the_oldest_turns_are_left_out_and_no_more(
    serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]
) -> None:
    serving = serve(FakeScheduler(lambda _: Script(tokens=saying("hi"))))
    tokenizer, client = serving.router.tokenizer, serving.client()
    turns: Any = []
    for number in range(40):
        turns.append({"role": "user", "content": f"question {number}"})
        turns.append({"role": "assistant", "content": f"answer {number}"})
    ask: Any = {"model": "tiny", "input": turns, "instructions": "stay"}
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**ask)
    assert raised.value.code == "context_length_exceeded"
    for room in (1, 20, 60, 100, 150):
        client.responses.create(**ask, truncation="auto", max_output_tokens=room)
        request = serving.schedulers[0].submitted[-1]
        prompt = tokenizer.decode(request.token_ids, skip_special_tokens=False)
        assert prompt.startswith("<|im_start|>system\nstay<|im_end|>\n<|im_start|>user\nquestion")
        assert "answer 39" in prompt
        assert len(request.token_ids) + room <= 256
        last = int(prompt.partition("question ")[2].partition("<")[0]) - 1
        left_out = f"user\nquestion {last}<|im_end|>\n<|im_start|>assistant\nanswer {last}"
        longer = tokenizer.encode(f"{prompt}<|im_start|>{left_out}<|im_end|>\n", False)
        assert len(longer) + room > 256
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="tiny", input="x" * 2000, truncation="auto")
    assert raised.value.code == "context_length_exceeded"


def test_a_scheduler_that_does_not_answer_is_not_taken_for_one_that_has_nothing(
    serve: Callable[..., Serving],
) -> None:
    fake = FakeScheduler()
    serving = serve(fake, health_timeout=0.5, scheduler_timeout=PATIENCE)
    fake.is_hung = True
    reply = httpx.get(f"{serving.url}/v1/responses/{ID}", timeout=PATIENCE)
    assert reply.status_code == 503
    assert json.loads(reply.text)["error"]["type"] == "service_unavailable_error"
