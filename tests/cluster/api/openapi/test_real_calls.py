"""Calls of every route, good and bad, streamed and whole: what comes back is as the document says.

The objects of answers are held to be closed: a field that the document does not name is a failure.
"""

import base64
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.errors import BY_NAME, ErrorInfo
from cluster.request import Request
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.api.openapi.described import Described, events_of
from tests.cluster.api.tools.conftest import NOW, WEATHER, model_of, start
from tests.cluster.conftest import Serving

__all__ = ["model_of", "start"]  # fixtures

HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 3}
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
INPUT: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 3}
LOGPROBS = ["message.output_text.logprobs"]
WEIGHTS = b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "  # as a safetensors file begins
ENCODED = base64.b64encode(WEIGHTS).decode()
# What answers to a prompt may be asked in.
ASKS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PROMPT,
    "/v1/responses": INPUT,
    "/v1/messages": CHAT,
    "/v1/embeddings": {"model": "tiny", "input": "hello"},
}
CALLING = (
    "<think>well</think>I look. <tool_call>"
    '{"name": "get_weather", "arguments": {"city": "Riga", "days": 2}}</tool_call>'
)


def scripted(request: Request) -> Script:
    """Let the salt of a request say what becomes of it."""
    kind, _, num_tokens = request.cache_salt.partition(":")
    if kind not in BY_NAME:
        return Script(num_cached_tokens=1)
    after = 1 if kind == "Overloaded" else None
    return Script((5,) * int(num_tokens), error=ErrorInfo(kind, "so it is", retry_after=after))


@pytest.fixture(scope="module")
def with_vectors(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("vectors") / "model"
    shutil.copytree(model_dir, directory)
    (directory / "config.json").write_text('{"hidden_size": 3}')
    return str(directory)


@pytest.fixture(scope="module")
def serving(serve_once: Callable[..., Serving], with_vectors: str) -> Serving:
    return serve_once(FakeScheduler(scripted), model_dir=with_vectors)


@pytest.fixture(scope="module")
def call(serving: Serving) -> Described:
    return Described(serving.url)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"n": 2, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"return_token_ids": True, "prompt_logprobs": 1}),
        ("/v1/completions", {}),
        ("/v1/completions", {"n": 2, "logprobs": 2, "echo": True, "return_token_ids": True}),
        ("/v1/completions", {"prompt": ["a", "b"], "prompt_logprobs": 0}),
        ("/v1/completions", {"max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/responses", {"metadata": {"a": "b"}, "instructions": "be brief"}),
        ("/v1/responses", {"include": LOGPROBS, "top_logprobs": 2}),
        ("/v1/messages", {"system": "be brief", "stop_sequences": ["e"]}),
        ("/v1/messages/count_tokens", {"max_tokens": None}),
        ("/v1/embeddings", {"encoding_format": "base64"}),
        ("/v1/embeddings", {"input": [[5, 6], [7]]}),
        ("/v1/chat/completions/render", {"temperature": 0.5, "logit_bias": {"7": 1}}),
        ("/v1/completions/render", {"stream": True, "stream_options": {"include_usage": True}}),
    ],
)
def test_answers(call: Described, path: str, change: dict[str, Any]) -> None:
    asked = next(body for asked, body in ASKS.items() if path.startswith(asked))
    assert call("POST", path, json=asked | change).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "least"),
    [
        ("/v1/chat/completions", {"n": 2, "logprobs": True, "return_token_ids": True}, 2),
        ("/v1/chat/completions", {"stream_options": {"resumable": True}}, 1),
        (
            "/v1/chat/completions",
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            2,
        ),
        ("/v1/completions", {"echo": True, "logprobs": 2, "return_token_ids": True}, 1),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, 2),
        ("/v1/responses", {"include": LOGPROBS, "top_logprobs": 1}, 8),
        ("/v1/messages", {}, 6),
    ],
)
def test_streams(call: Described, path: str, change: dict[str, Any], least: int) -> None:
    reply = call("POST", path, json=ASKS[path] | {"stream": True} | change)
    assert len(events_of(reply.text)) >= least


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("streams", [False, True])
def test_answers_with_thoughts_and_calls(
    start: Callable[..., Serving], path: str, streams: bool
) -> None:
    serving = start("thinking", CALLING)
    tools: list[Any] = [WEATHER, NOW]
    if path == "/v1/responses":
        tools = [tool["function"] | {"type": "function"} for tool in tools]
    elif path == "/v1/messages":
        tools = [
            {"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in tools
        ]
    body = ASKS[path] | {"tools": tools, "stream": streams, "max_tokens": 300}
    if path == "/v1/responses":
        body |= {"max_tokens": None, "max_output_tokens": 300}
    if path == "/v1/messages":
        body |= {"thinking": {"type": "adaptive"}}
    reply = Described(serving.url)("POST", path, json=body)
    text = reply.text
    assert all(name in text for name in ("get_weather", "Riga")) or (streams and "name" in text)
    assert "tool" in text or "function_call" in text


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize(
    "kind", ["InvalidRequest", "NotFound", "Conflict", "Overloaded", "Internal", "DeadlineExceeded"]
)
def test_calls_that_a_scheduler_refuses(call: Described, path: str, kind: str) -> None:
    for streams in (False, True):
        if not (streams and path == "/v1/embeddings"):
            body = ASKS[path] | {"cache_salt": f"{kind}:0"} | ({"stream": True} if streams else {})
            if path == "/v1/responses" and streams:  # it has begun when it fails
                assert call("POST", path, json=body).status_code in (200, BY_NAME[kind].status)
            elif path != "/v1/responses":
                assert call("POST", path, json=body).status_code == BY_NAME[kind].status


@pytest.mark.parametrize("path", [path for path in ASKS if path != "/v1/embeddings"])
def test_streams_that_break_off(call: Described, path: str) -> None:
    body = ASKS[path] | {"cache_salt": "Internal:2", "stream": True}
    assert "so it is" in call("POST", path, json=body).text


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        *(("POST", path, {"json": {}}, 400) for path in ASKS),
        *(("POST", path, {"content": b"{"}, 400) for path in ASKS),
        *(("POST", path, {"json": ASKS[path] | {"model": "none"}}, 404) for path in ASKS),
        ("POST", "/v1/messages/count_tokens", {"json": {}}, 400),
        ("POST", "/v1/messages/count_tokens", {"json": CHAT | {"model": "no"}}, 400),
        ("POST", "/v1/chat/completions/render", {"json": {}}, 400),
        ("POST", "/v1/completions/render", {"json": PROMPT | {"model": "none"}}, 404),
        ("POST", "/tokenize", {"json": {"prompt": "a", "return_token_strs": True}}, 200),
        ("POST", "/tokenize", {"json": {"messages": HELLO}}, 200),
        ("POST", "/tokenize", {"json": {}}, 400),
        ("POST", "/tokenize", {"json": {"prompt": "a", "model": "none"}}, 404),
        ("POST", "/detokenize", {"json": {"tokens": [5, 6]}}, 200),
        ("POST", "/detokenize", {"json": {"tokens": [-5]}}, 400),
        ("POST", "/detokenize", {"json": {"tokens": [5], "model": "none"}}, 404),
        ("GET", "/tokenizer_info", {}, 200),
        ("GET", "/v1/streams/none", {}, 404),
        ("GET", "/v1/responses/none", {}, 404),
        ("GET", "/v1/responses/none?stream=maybe", {}, 400),
        ("POST", "/v1/responses/none/cancel", {}, 404),
        ("DELETE", "/v1/responses/none", {}, 404),
        ("GET", "/v1/models", {}, 200),
        ("GET", "/v1/models?limit=0", {}, 400),
        ("GET", "/v1/models/tiny", {}, 200),
        ("GET", "/v1/models/none", {}, 404),
        ("GET", "/health", {}, 200),
        ("GET", "/ping", {}, 200),
        ("POST", "/ping", {}, 200),
        ("GET", "/ready", {}, 200),
        ("GET", "/version", {}, 200),
        ("GET", "/metrics", {}, 200),
        ("POST", "/reset_prefix_cache", {}, 200),
        ("POST", "/reset_prefix_cache?reset_running_requests=1", {}, 400),
    ],
)
def test_other_calls(
    call: Described, method: str, path: str, content: dict[str, Any], status: int
) -> None:
    assert call(method, path, **content).status_code == status


def test_the_life_of_adapters(call: Described) -> None:
    def load(path: str, **more: Any) -> httpx.Response:
        return call("POST", "/v1/load_lora_adapter", json={"lora_path": path, **more})

    json_wanted = {"headers": {"Accept": "application/json"}}
    assert load("/a/1", lora_name="law").status_code == 200
    assert load("/a/2", lora_name="law").status_code == 400
    assert load("/a/broken", lora_name="other").status_code == 400
    body = {"lora_name": "law", "lora_path": "/a/2", "load_inplace": True}
    assert call("POST", "/v1/load_lora_adapter", json=body, **json_wanted).status_code == 200
    for path, content, status in (
        ("rollback", {}, 200),
        ("rollback", {"json": {"version": 99}}, 409),
        ("rollback", {"json": {"version": -1}}, 400),
        ("split", {"json": {"1": 40, "2": 60}}, 200),
        ("split", {"json": {"1": 40}}, 400),
        ("pin", {}, 200),
    ):
        assert call("POST", f"/v1/adapters/law/{path}", **content).status_code == status, path
        assert call("POST", f"/v1/adapters/none/{path}", **content).status_code in (404, 400)
    assert call("DELETE", "/v1/adapters/law/pin").status_code == 200
    assert call("DELETE", "/v1/adapters/none/pin").status_code == 404
    assert call("GET", "/v1/adapters").json()["data"][0]["name"] == "law"
    assert call("GET", "/v1/adapters?limit=no").status_code == 400
    assert call("GET", "/v1/adapters/law").status_code == 200
    assert call("GET", "/v1/adapters/none").status_code == 404
    assert call("GET", "/v1/models/law").json()["parent"] == "tiny"
    assert call("PUT", "/v1/adapters/put", content=WEIGHTS).status_code == 200
    assert call("PUT", "/v1/adapters/put", content=WEIGHTS).status_code == 400
    assert call("PUT", "/v1/adapters/put?load_inplace=x", content=WEIGHTS).status_code == 400
    for name, status in (("law", 200), ("law", 404)):
        body = {"lora_name": name}
        reply = call("POST", "/v1/unload_lora_adapter", json=body, **json_wanted)
        assert reply.status_code == status
    assert call("POST", "/v1/unload_lora_adapter", json={"lora_name": "put"}).status_code == 200
    assert call("POST", "/v1/unload_lora_adapter", json={}).status_code == 400


def test_the_life_of_adapters_as_sglang_has_it(call: Described) -> None:
    tensors = {"lora_name": "t", "config_dict": {"r": 8}, "serialized_tensors": ENCODED}
    for path, body, status in (
        ("/load_lora_adapter", {"lora_name": "law", "lora_path": "/a/1"}, 200),
        ("/load_lora_adapter", {"lora_name": "law", "lora_path": "/a/2"}, 400),
        ("/load_lora_adapter_from_tensors", tensors, 200),
        ("/load_lora_adapter_from_tensors", tensors | {"serialized_tensors": "?"}, 400),
        ("/unload_lora_adapter", {"lora_name": "law"}, 200),
        ("/unload_lora_adapter", {"lora_name": "law"}, 404),
        ("/unload_lora_adapter", {}, 400),
    ):
        assert call("POST", path, json=body).status_code == status


def test_responses_that_are_stored(routers: tuple[Serving, Serving]) -> None:
    call = Described(routers[1].url)
    for change in ({}, {"background": True}, {"background": True, "stream": True}):
        reply = Described(routers[0].url)("POST", "/v1/responses", json=INPUT | change)
        events = events_of(reply.text) if "stream" in change else [{"response": reply.json()}]
        path = f"/v1/responses/{events[0]['response']['id']}"
        assert call("GET", path).status_code == 200
        assert len(events_of(call("GET", f"{path}?stream=true").text)) > 5
        assert call("GET", f"{path}?starting_after=x&stream=true").status_code == 400
        cancelled = call("POST", f"{path}/cancel")
        assert cancelled.status_code == (200 if "background" in change else 400)
        assert call("DELETE", path).status_code == 200
        assert call("GET", path).status_code == 404


def test_streams_that_are_read_on(routers: tuple[Serving, Serving]) -> None:
    options = {"stream": True, "stream_options": {"resumable": True, "include_usage": True}}
    for path in ("/v1/chat/completions", "/v1/completions"):
        begun = Described(routers[0].url)("POST", path, json=ASKS[path] | options)
        call, path = Described(routers[1].url), f"/v1/streams/{begun.headers['X-Stream-Id']}"
        whole = call("GET", path)
        assert events_of(whole.text)[-1] == events_of(begun.text)[-1]
        assert call("GET", path, headers={"Last-Event-ID": "?"}).status_code == 400


def test_the_events_of_the_caches_and_too_many_readers(serving: Serving, call: Described) -> None:
    def read(response: httpx.Response) -> Iterator[bytes]:
        """Give the first event: the stream has no end."""
        for part in response.iter_raw():
            if part.startswith(b"data: "):
                yield part
                return

    with httpx.stream("GET", f"{serving.url}/v1/kv_events") as stream:
        first = b"".join(read(stream))
    whole = httpx.Response(
        stream.status_code, headers=stream.headers, content=first, request=stream.request
    )
    assert events_of(call.checked(whole).text)[0]["replica"] == "0"


def test_a_server_without_a_scheduler_that_is_drained_or_has_too_much_to_do(
    serve: Callable[..., Serving], with_vectors: str
) -> None:
    empty = serve(model_dir=with_vectors)
    call = Described(empty.url)
    for path in ("/health", "/ready", "/v1/kv_events", "/ping"):
        assert call("GET", path).status_code == 503
    full = serve(FakeScheduler(), model_dir=with_vectors, max_in_flight=0)
    drained = serve(FakeScheduler(), model_dir=with_vectors)
    drain = Described(drained.url)
    assert drain("POST", "/v1/drain").json()["status"] == "draining"
    for server, status in ((empty, 503), (full, 429), (drained, 503)):
        call = Described(server.url)
        for path, body in ASKS.items():
            reply = call("POST", path, json=body)
            assert reply.status_code == status
            assert int(reply.headers["Retry-After"]) > 0
    assert drain("GET", "/ready").json()["status"] == "draining"
    assert drain("DELETE", "/v1/drain").status_code == 200


def test_an_unexpected_failure_has_the_shape_of_its_route_and_the_id_of_its_call(
    serve: Callable[..., Serving], with_vectors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve(FakeScheduler(), model_dir=with_vectors)
    call = Described(serving.url)

    async def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("unexpected")

    for name in ("resolve", "records", "record", "absent", "load", "unload"):
        monkeypatch.setattr(serving.backend, name, fail)
    headers = {"X-Request-Id": "job-7"}
    for path, body in ASKS.items():
        reply = call("POST", path, json=body | {"model": "other"}, headers=headers)
        assert (reply.status_code, reply.headers["X-Request-Id"]) == (500, "job-7")
    load = {"lora_name": "a", "lora_path": "/a/1"}
    assert call("POST", "/load_lora_adapter", json=load).json()["success"] is False
    assert call("POST", "/v1/load_lora_adapter", json=load).json()["error"]["code"] == 500
    assert call("GET", "/v1/adapters").status_code == 500


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/none", "/v1/messages/count_tokens"])
def test_what_is_no_call_of_the_messages_api_is_refused_in_its_shape(
    serving: Serving, path: str
) -> None:
    reply = httpx.get(serving.url + path)
    assert reply.status_code == (404 if path.endswith("none") else 405)
    error = reply.json()
    assert error["type"] == "error" and "Not" in error["error"]["message"]
    assert error["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert ("allow" in reply.headers) is (reply.status_code == 405)


def test_callers_without_a_key_or_the_right(
    serve: Callable[..., Serving], with_vectors: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "- {key: top-secret-1, tenant: a}\n- {key: top-secret-2, tenant: b, scopes: [metrics]}"
    )
    serving = serve(FakeScheduler(), model_dir=with_vectors, api_key_file=str(path))
    serving.run(serving.backend.load("law", "/a/1", False, False))
    call = Described(serving.url, {"Authorization": "Bearer top-secret-2"})
    with_key = {"Authorization": "Bearer top-secret-1"}
    for pattern, by_method in call.document["paths"].items():
        for method, operation in by_method.items():
            concrete = pattern.replace("{name}", "law").replace("{", "").replace("}", "")
            is_open = operation["security"] == []
            content: dict[str, Any] = {}
            told = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            names_model = "model" in told.get("example", ()) or call.has_field(
                told.get("schema"), "model"
            )
            if names_model:
                content = {"json": told["example"] | {"model": "law"}}
            without = call(method, concrete, **content)
            assert (without.status_code == 401) is not is_open, f"{method} {pattern}"
            reply = call(method, concrete, headers=with_key, **content)
            if names_model or (method, pattern) in SHOWN:
                assert reply.status_code == 404, f"{method} {pattern}: {reply.text}"
                assert "does not exist" in reply.text
            elif "403" in operation["responses"]:
                assert reply.status_code == 403, f"{method} {pattern}: {reply.text}"
            if pattern in ASKS:
                content = {"json": ASKS[pattern] | {"priority": -1}}
                reply = call(method, concrete, headers=with_key, **content)
                assert reply.status_code == 403, f"{method} {pattern}: {reply.text}"


# What tells of an adapter by its name.
SHOWN = (("get", "/v1/models/{name}"), ("get", "/v1/adapters/{name}"))


def test_callers_without_keys_who_lack_a_right(
    serve: Callable[..., Serving], with_vectors: str
) -> None:
    serving = serve(FakeScheduler(), model_dir=with_vectors, anonymous=True)
    call = Described(serving.url)
    assert call("POST", "/v1/drain").status_code == 403
    assert call("PUT", "/v1/adapters/law", content=WEIGHTS).status_code == 403
    assert call("GET", "/metrics").status_code == 200
