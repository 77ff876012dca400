"""Anthropic's Messages API over scripted answers, by HTTP: shapes, prompts, hostile bodies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.errors import ErrorInfo
from cluster.request import Request
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

Saying = Callable[..., tuple[int, ...]]
Serve = Callable[..., Serving]
ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hello"}],
}


def post(serving: Serving, path: str = "", **body: Any) -> httpx.Response:
    url = f"{serving.url}/v1/messages{path}"
    return httpx.post(url, json={**ASK, **body}, timeout=PATIENCE)


def prompt_of(serving: Serving) -> str:
    (request,) = serving.schedulers[0].submitted
    return serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)


def test_an_answer_is_a_message_streamed_or_not(serve: Serve, saying: Saying) -> None:
    script = Script(tokens=saying("hello 🌳 world"), num_cached_tokens=3)
    serving = serve(FakeScheduler(lambda _: script))
    whole = post(serving, max_tokens=50, request_id="q")
    assert whole.status_code == 200, whole.text
    message = whole.json()
    num_prompt = len(serving.schedulers[0].submitted[0].token_ids)
    usage = {
        "input_tokens": num_prompt - 3,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(script.tokens or ()),
    }
    assert message == {
        "type": "message",
        "id": "msg_q",
        "model": "tiny",
        "role": "assistant",
        "content": [{"type": "text", "text": "hello 🌳 world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage,
    }
    assert whole.headers["request-id"]
    streamed = post(serving, max_tokens=50, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["request-id"]
    assert "[DONE]" not in streamed.text
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    deltas = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(deltas) == "hello 🌳 world"
    assert events[-2]["usage"] == usage


def test_system_and_turns_reach_the_template(serve: Serve, saying: Saying) -> None:
    serving = serve(FakeScheduler(lambda _: Script(tokens=saying("hi"))))
    cached = {"type": "ephemeral", "ttl": "1h"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "u", "cache_control": cached}]},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
    ]
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]
    assert post(serving, messages=messages, system=system).status_code == 200
    told = (("system", "s\nt"), ("user", "u"), ("assistant", "a"), ("user", "v"))
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in told)
    assert prompt_of(serving) == f"{expected}<|im_start|>assistant\n"


def test_a_last_turn_of_the_assistant_goes_on(serve: Serve, saying: Saying) -> None:
    serving = serve(FakeScheduler(lambda _: Script(tokens=saying("lo"))))
    reply = post(serving, messages=[*ASK["messages"], {"role": "assistant", "content": "hel"}])
    assert reply.json()["content"] == [{"type": "text", "text": "lo"}]
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhel"
    assert prompt_of(serving) == prompt


def test_a_last_turn_that_says_nothing_begins_an_answer(serve: Serve, saying: Saying) -> None:
    serving = serve(FakeScheduler(lambda _: Script(tokens=saying("hi"))))
    post(serving, messages=[*ASK["messages"], {"role": "assistant", "content": " "}])
    assert prompt_of(serving).endswith("hello<|im_end|>\n<|im_start|>assistant\n")


def test_parameters_become_those_of_the_request(serve: Serve) -> None:
    serving = serve(FakeScheduler())
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    reply = post(
        serving,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=11,
        priority=3,
        cache_salt="pepper",
        metadata={"user_id": "someone"},
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"},
        thinking={"type": "disabled"},
        tools=[],
        tool_choice={"type": "auto"},
        cache_control={"type": "ephemeral"},
        service_tier="auto",
        context_management={"edits": []},
        container=None,
    )
    assert reply.status_code == 200, reply.text
    (request,) = serving.schedulers[0].submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.seed, request.priority, request.cache_salt) == (11, 3, "pepper")
    assert request.max_tokens == 9
    assert "integer" in sampling.grammar


def test_a_stop_sequence_ends_the_answer(serve: Serve, saying: Saying) -> None:
    serving = serve(FakeScheduler(lambda _: Script(tokens=saying("hello world"))))
    message = post(serving, stop_sequences=["x", "o w"], max_tokens=50).json()
    assert message["content"] == [{"type": "text", "text": "hell"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "o w")


def test_thoughts_are_not_part_of_the_answer(serve: Serve, saying: Saying) -> None:
    script = Script(tokens=saying("the fox jumps</think>hello"))
    serving = serve(FakeScheduler(lambda _: script), reasoning_parser="deepseek_r1")
    whole = post(serving, max_tokens=90).json()
    assert whole["content"] == [{"type": "text", "text": "hello"}]
    streamed = post(serving, max_tokens=90, stream=True).text
    lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    deltas = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(deltas) == "hello"


def test_counted_are_the_tokens_of_the_prompt(serve: Serve) -> None:
    serving = serve(FakeScheduler())
    ask = {name: ASK[name] for name in ("model", "messages")} | {"system": "be brief"}
    url = f"{serving.url}/v1/messages"
    count = httpx.post(f"{url}/count_tokens", json=ask, timeout=PATIENCE).json()
    usage = httpx.post(url, json=ask | {"max_tokens": 1}, timeout=PATIENCE).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"]}
    reply = post(serving, "/count_tokens")
    assert reply.status_code == 400
    assert "max_tokens is not a known parameter" in reply.json()["error"]["message"]


def test_a_key_comes_in_either_header(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{key: secret-one, tenant: t}]")
    serving = serve(FakeScheduler(), api_key_file=str(keys))
    url = f"{serving.url}/v1/messages"
    for headers, status in (
        ({"X-Api-Key": "secret-one", "Anthropic-Version": "2023-06-01"}, 200),
        ({"Authorization": "Bearer secret-one"}, 200),
        ({"Authorization": "Bearer wrong-one", "X-Api-Key": "secret-one"}, 401),
        ({"X-Api-Key": "wrong-one"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({}, 401),
    ):
        reply = httpx.post(url, json=ASK, headers=headers, timeout=PATIENCE)
        assert reply.status_code == status
        if status == 401:
            assert reply.json()["error"]["type"] == "authentication_error"
    assert {request.tenant for request in serving.schedulers[0].submitted} == {"t"}


def test_an_error_before_the_first_event_is_a_status_and_later_an_event(
    serve: Serve, saying: Saying
) -> None:
    def script(request: Request) -> Script:
        error = ErrorInfo("Overloaded", "too much", retry_after=1)
        return Script(
            tokens=saying("hello", ends=False) if request.max_tokens > 9 else (), error=error
        )

    serving = serve(FakeScheduler(script))
    for streams in (False, True):
        reply = post(serving, stream=streams)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json() == {
            "type": "error",
            "error": {"type": "rate_limit_error", "message": "too much"},
            "request_id": reply.headers["request-id"],
        }
    last = post(serving, stream=True, max_tokens=10).text.rstrip().rpartition("\n\n")[2]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == "too much"


@pytest.fixture(scope="module")
def refusing(serve_once: Serve) -> Serving:
    return serve_once(FakeScheduler(), max_body_bytes=4_000_000)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"max_tokens": 1000}, "context length is 256 tokens"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages: they say nothing"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user"}]}, "messages.0.content: "),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content: must be a string or"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0: must be an"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages.0.content.0.b is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0: a block of type 'image' is not supported: only text",
        ),
        ({"system": 3}, "system: must be a string or a list"),
        ({"system": [{"type": "thinking"}]}, "system.0: a block of type 'thinking'"),
        ({"stop_sequences": "a"}, "stop_sequences: "),
        ({"stop_sequences": [""]}, "stop_sequences.0: "),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: "),
        ({"temperature": 3}, "temperature: "),
        ({"top_k": -1}, "top_k: "),
        ({"metadata": {"user_id": 3}}, "metadata.user_id: "),
        ({"metadata": {"king": 3}}, "metadata.king is not a known parameter"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "chat template does not tell it of tools"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: must be an object"),
        ({"tools": [{"name": "f", "input_schema": {}, "x": 1}]}, "tools.0.x is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "is not supported: only tools"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
            "tools.0.input_schema: must be a JSON schema of an object",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: must be 1 to 128"),
        ({"tool_choice": {"type": "any"}}, "there are no tools to choose from"),
        ({"tool_choice": "auto"}, "tool_choice: must be an object of type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: must be an object of type"),
        ({"thinking": {"type": "sometimes"}}, "thinking: must be an object of type enabled"),
        ({"output_config": {"effort": "max"}}, "output_config.effort is not supported"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget is not a known"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format: must be"),
        ({"output_format": {"type": "json_schema"}}, "output_config.format.schema: must be"),
        (
            {"output_format": {"type": "json_schema", "schema": {"type": "king"}}},
            "output_config.format",
        ),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "messages": [{"role": "assistant", "content": "{"}],
            },
            "cannot go on with the last message",
        ),
        ({"service_tier": "priority"}, "service_tier is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"context_management": {"edits": [{}]}}, "context_management is not supported"),
        ({"n": 2}, "n is not a known parameter"),
        ({"lora": []}, "lora: "),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_mistake_is_named(refusing: Serving, change: dict[str, Any], reason: str) -> None:
    reply = post(refusing, **change)
    assert reply.status_code == 400, reply.text
    body = reply.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert reason in body["error"]["message"]
    assert not refusing.schedulers[0].submitted


def test_an_unknown_model_is_not_found(refusing: Serving) -> None:
    for path in ("", "/count_tokens"):
        body = {name: ASK[name] for name in ASK if not path or name != "max_tokens"}
        url = f"{refusing.url}/v1/messages{path}"
        reply = httpx.post(url, json=body | {"model": "none"}, timeout=PATIENCE)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("path", ["", "/count_tokens"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": ' + b"[" * 1_000_000,
        b'{"model": "tiny", "system": ' + b'[{"a":' * 100_000,
        b'{"model": "tiny", "messages": [' + b"[]," * 1_000_000 + b"[]]}",
        b'{"model": "tiny", "messages": [' + b"{}," * 1_000_000 + b"{}]}",
        b'{"model": "tiny", "x": [' + b"0," * 1_000_000 + b"0]}",
        b'{"model": "tiny", "system": "' + b'\\"' * 1_500_000,
        b'{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": '
        + b"[" * 199
        + b"]" * 199
        + b"}]}",
        b'{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "'
        + b"a" * 3_900_000
        + b'"}]}',
        b'{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], '
        b'"output_format": {"type": "json_schema", "schema": '
        + b'{"not": ' * 180
        + b"{}"
        + b"}" * 180
        + b"}}",
        b'"hello"',
        b"\xff",
        b"",
    ],
    ids=range(13),
)
def test_a_hostile_body_is_refused(refusing: Serving, body: bytes, path: str) -> None:
    url = f"{refusing.url}/v1/messages{path}"
    reply = httpx.post(url, content=body, timeout=PATIENCE)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
    assert not refusing.schedulers[0].submitted
