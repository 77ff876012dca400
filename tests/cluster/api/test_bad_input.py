"""Hostile and mistaken calls: the status, the reason and the parameter's name."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ValidationError

from cluster.api.schemas.requests import ChatBody, DetokenizeBody, TokenizeBody
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.patience import PATIENCE

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def post(serve_once: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that posts a body and returns (status, error object)."""
    limits = {"max_body_bytes": 200_000, "max_prompts": 4, "max_choices": 3, "max_answers": 5}
    serving = serve_once(FakeScheduler(), **limits)

    def send(path: str, **content: Any) -> tuple[int, dict[str, Any]]:
        reply = httpx.post(serving.url + path, timeout=PATIENCE, **content)
        assert not serving.schedulers[0].submitted
        return reply.status_code, reply.json()["error"]

    return send


@pytest.mark.parametrize(
    ("change", "param", "reason"),
    [
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_tokens": 1000}, "max_tokens", "context length is 256 tokens, but 10"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "over max_tokens, 8"),
        ({"seed": 2**64}, "seed", "less than or equal to"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 strings, not 17"),
        ({"stop": ""}, "stop", "1 to 1024 characters"),
        ({"stop": [1]}, "stop", "a string or a list of strings"),
        ({"stop": {"a": 1}}, "stop", "a string or a list of strings"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "token 1000000 is out of vocabulary"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token -1 is out of vocabulary"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
        ({"logit_bias": {"a": 1, "3": 1, "b": 1}}, "logit_bias", "'a', 'b' are no token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "out of vocabulary"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
        (
            {"stream": True, "stream_options": {"chunk_size": 2}},
            "stream_options.chunk_size",
            "is not supported",
        ),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 4}, "n", "at most 3, not 4"),
        ({"n": True}, "n", "valid integer"),
        ({"best_of": 2}, "best_of", "is not supported"),
        ({"priority": 2**31}, "priority", "less than or equal to 2147483647"),
        ({"priority": -(2**31) - 1}, "priority", "greater than or equal to -2147483648"),
        ({"priority": 0.5}, "priority", "valid integer"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "must be an object"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "no effort"),
        ({"temprature": 1}, "temprature", "is not a known parameter"),
        ({"use_beam_search": True}, "use_beam_search", "tokens are drawn one after the other"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages.0.role", "at least 1 character"),
        ({"messages": [{"role": "k" * 65, "content": "a"}]}, "messages.0.role", "at most 64"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "a list of text"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "a string or a list of text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            "only parts of type text",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
            "messages.0.content",
            "has no refusal",
        ),
        (
            {"messages": [{"role": "user", "content": "a"} | {f"k{n}": n for n in range(65)}]},
            "messages.0",
            "more than 64 other keys",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "k": [0] * 20_000}]},
            "messages.0",
            "more than 16384 values",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "k": [0] * 9_000}] * 2},
            "messages.1",
            "more than 16384 values",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "k": json.loads("[" * 40 + "]" * 40)}]},
            "messages.0",
            "more than 32 values in one another",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "k" * 129: 1}]},
            "messages.0." + "k" * 100,
            "over 128 characters",
        ),
        ({"request_id": "a b"}, "request_id", "should match pattern"),
        ({"request_id": "x" * 65}, "request_id", "should match pattern"),
        ({"request_id": 7}, "request_id", "valid string"),
        ({"request_id": "a", "rid": "b"}, "rid", "is not the request_id"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages.0.tool_calls.0",
            "must be a call of type function",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "no tools here"),
        ({"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", "cannot be set"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "Cannot set both",
        ),
        ({"model": None}, "model", "valid string"),
    ],
)
def test_a_bad_chat_parameter_is_refused_by_name(
    post: Callable[..., Any], change: dict[str, Any], param: str, reason: str
) -> None:
    status, error = post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO} | change)
    assert status == 400
    assert error["param"] == param
    assert reason in error["message"]
    assert param in error["message"] or param in ("max_tokens", "messages")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "must not be empty"),
        ([], "1 to 4 prompts"),
        ([[]], "must be a string"),
        (["a", ""], "must not be empty"),
        (["a"] * 5, "1 to 4 prompts in one call, not 5"),
        (["a", 1], "must be a string"),
        ([True], "must be a string"),
        ({"text": "a"}, "must be a string"),
        (None, "must be a string"),
        ([5, 10**9], "token 1000000000 is out of vocabulary"),
        ([[5], [-1]], "token -1 is out of vocabulary"),
        ([5] * 256, "context length is 256 tokens, but the prompt alone has 256"),
        ("a" * 100_000, "a prompt of 100000 characters cannot fit"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_reason(
    post: Callable[..., Any], prompt: Any, reason: str
) -> None:
    status, error = post("/v1/completions", json={"model": "tiny", "prompt": prompt})
    assert status == 400
    assert error["param"] == "prompt"
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "reason"),
    [
        ({"n": 4}, "n", "at most 3, not 4"),
        ({"best_of": 4}, "best_of", "at most 3, not 4"),
        ({"best_of": 0}, "best_of", "greater than or equal to 1"),
        ({"best_of": "2"}, "best_of", "valid integer"),
        ({"n": 3, "best_of": 2}, "best_of", "2 is less than n, 3"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of", "cannot be streamed"),
        ({"n": 3, "prompt": ["a", "b"]}, "n", "2 prompts with 3 answers each are over the limit"),
        ({"best_of": 3, "prompt": ["a", "b"]}, "best_of", "over the limit of 5 answers"),
    ],
)
def test_a_bad_number_of_choices_is_refused_by_name(
    post: Callable[..., Any], change: dict[str, Any], param: str, reason: str
) -> None:
    status, error = post("/v1/completions", json={"model": "tiny", "prompt": "a"} | change)
    assert (status, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
    assert reason in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "tiny", "messages": "\\ud800"}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "top_p": NaN}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "min_p": 1e999}',
        b" " * 200_001,
    ],
)
def test_a_malformed_body_is_a_400(post: Callable[..., Any], body: bytes) -> None:
    status, error = post("/v1/chat/completions", content=body)
    assert status == 400
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("kind", "is_taken"),
    [
        ("application/x-www-form-urlencoded", False),
        ("text/plain;charset=UTF-8", False),  # what a page of any site may send without asking
        ("multipart/form-data; boundary=x", False),
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/vnd.api+json", True),
        ("", True),
    ],
)
def test_a_body_that_says_to_be_no_json_is_not_read(
    post: Callable[..., Any], kind: str, is_taken: bool
) -> None:
    body = json.dumps({"model": "nobody", "messages": HELLO})
    status, error = post("/v1/chat/completions", content=body, headers={"Content-Type": kind})
    assert (status, error["param"]) == ((404, "model") if is_taken else (400, "Content-Type"))


def test_parameters_that_ask_for_nothing_are_accepted(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    neutral: Any = {
        "n": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"},
        "user": "someone", "metadata": {"a": "b"}, "store": False, "best_of": 1, "echo": False,
        "suffix": None, "top_k": -1, "stop": None, "logprobs": False, "service_tier": "auto",
        "priority": 0,
    }  # fmt: skip
    reply = httpx.post(
        f"{serving.url}/v1/chat/completions",
        json={"model": "tiny", "messages": HELLO, "max_tokens": 2} | neutral,
    )
    assert reply.status_code == 200


def test_an_unknown_model_is_openais_not_found(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    with pytest.raises(openai.NotFoundError) as caught:
        serving.client().chat.completions.create(model="nobody", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        serving.client().models.retrieve("nobody")


def test_bad_parameters_are_openais_bad_request(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    with pytest.raises(openai.BadRequestError, match="n: at most 16, not 17"):
        serving.client().chat.completions.create(model="tiny", messages=HELLO, n=17)


def test_unknown_routes_have_the_same_shape(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    missing = httpx.post(f"{serving.url}/v1/files", json={})
    wrong = httpx.get(f"{serving.url}/v1/chat/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["type"] == "not_found_error"
    assert "GET /v1/chat/completions" in wrong.json()["error"]["message"]


def test_an_unexpected_failure_is_a_500_of_the_same_shape(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())

    async def break_down(names: object) -> None:
        raise KeyError(names)

    serving.backend.absent = break_down
    with pytest.raises(openai.InternalServerError) as caught:
        serving.client().chat.completions.create(model="other", messages=HELLO)
    assert caught.value.type == "server_error"
    assert serving.router.num_in_flight == 0


def test_a_request_id_is_honoured_but_not_trusted(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    for given, kept in (("job-7", "job-7"), ("a b<script>", "abscript"), ("x" * 99, "x" * 64)):
        reply = httpx.post(
            f"{serving.url}/v1/completions", json=body, headers={"X-Request-Id": given}
        )
        assert reply.headers["X-Request-Id"] == kept
        assert reply.json()["id"] == f"cmpl-{kept}"
    assert len(httpx.get(f"{serving.url}/version").headers["X-Request-Id"]) == 32
    ids = [request.request_id for request in serving.schedulers[0].submitted]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("param", ["request_id", "rid"])
def test_a_request_id_in_a_body_names_the_call_before_one_that_a_proxy_gave(
    serve: Callable[..., Any], param: str
) -> None:
    serving = serve(FakeScheduler())
    serving.run(serving.backend.load("json", "/a/json", False, False))
    reply = httpx.post(
        f"{serving.url}/v1/completions",
        json={"model": "json", "prompt": "a", "max_tokens": 1, param: "job-8"},
        headers={"X-Request-Id": "proxys-own"},
    )
    assert reply.json()["id"] == "cmpl-job-8"
    assert reply.headers["X-Request-Id"] == "proxys-own"
    assert serving.backend.resolved == [("json", "job-8")]
    (request,) = serving.schedulers[0].submitted
    assert request.request_id.startswith("job-8-")


def test_parts_of_text_may_say_nothing_else_by_null(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    parts = [{"type": "text", "text": "a", "annotations": None}, {"type": "text", "text": "b"}]
    messages: Any = [{"role": "user", "content": parts}]
    serving.client().chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    (request,) = serving.schedulers[0].submitted
    prompt = serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>user\na\nb<|im_end|>")


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (ChatBody, {"model": "m", "messages": [1] * 5000}),
        (ChatBody, {"model": "m", "messages": [{"role": ""}] * 5000}),
        (DetokenizeBody, {"tokens": ["a"] * 5000}),
        (TokenizeBody, {"messages": [1] * 5000}),
    ],
)
def test_one_mistake_of_many_is_looked_for_because_all_of_them_would_halt_the_streams(
    schema: type[BaseModel], body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as raised:
        schema.model_validate_json(json.dumps(body))
    assert raised.value.error_count() == 1
