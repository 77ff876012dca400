"""What calls would be, the tokenizer's description, and pings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import EOS, TEMPLATE, Serving
from tests.patience import PATIENCE

Serve = Callable[..., Serving]
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def post(serving: Serving, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{serving.url}{path}", json=body, timeout=PATIENCE)


def test_a_chat_is_shown_as_it_would_be_generated(serve: Serve) -> None:
    serving = serve(FakeScheduler())
    body = CHAT | {
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": 3,
        "stop": ["x", "yy"],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 4,
        "logit_bias": {"9": -1.5},
        "priority": 5,
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True},
        "request_id": "q",
    }
    shown = post(serving, "/v1/chat/completions/render", **body).json()
    assert not serving.schedulers[0].submitted
    post(serving, "/v1/chat/completions", **body)
    request = serving.schedulers[0].submitted[0]
    assert shown["token_ids"] == list(request.token_ids)
    assert shown["prompt"] == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert shown["request_id"] == "chatcmpl-q"
    assert shown["sampling_params"] == {
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 0,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 3,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {"9": -1.5},
        "logprobs": 4,
        "stop": ["x", "yy"],
        "stop_token_ids": [EOS],
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "structured_outputs": None,
        "thinking_token_budget": None,
    }
    rest = {name: shown[name] for name in ("model", "stream", "stream_options", "cache_salt")}
    assert rest == {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "s",
    }
    assert (shown["priority"], shown["features"]) == (5, None)


def test_what_is_left_out_has_its_default(serve: Serve) -> None:
    serving = serve(FakeScheduler())
    shown = post(serving, "/v1/chat/completions/render", **CHAT).json()
    sampling = shown["sampling_params"]
    assert sampling["max_tokens"] == 256 - len(shown["token_ids"])
    assert (sampling["seed"], sampling["logprobs"], sampling["logit_bias"]) == (None, None, None)
    assert (shown["stream"], shown["stream_options"]) == (False, None)
    formed = post(
        serving, "/v1/chat/completions/render", **CHAT, response_format={"type": "json_object"}
    ).json()
    assert "object" in formed["sampling_params"]["structured_outputs"]["grammar"]


def test_a_completion_is_shown_for_each_of_its_prompts(serve: Serve) -> None:
    serving = serve(FakeScheduler())
    prompts = ["hello", "world"]
    shown = post(serving, "/v1/completions/render", model="tiny", prompt=prompts).json()
    tokenizer = serving.router.tokenizer
    assert [one["token_ids"] for one in shown] == [[*tokenizer.encode(p, True)] for p in prompts]
    assert [one["prompt"] for one in shown] == prompts
    assert {one["sampling_params"]["max_tokens"] for one in shown} == {16}
    assert not serving.schedulers[0].submitted


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"messages": []}, 400),
        ({"max_tokens": 1000}, 400),
        ({"king": 1}, 400),
        ({"model": "none"}, 404),
        ({"response_format": {"type": "json_schema"}}, 400),
    ],
    ids=range(5),
)
def test_what_would_be_refused_is_refused(
    serve: Serve, change: dict[str, Any], status: int
) -> None:
    serving = serve(FakeScheduler())
    shown = post(serving, "/v1/chat/completions/render", **CHAT | change)
    called = post(serving, "/v1/chat/completions", **CHAT | change)
    assert (shown.status_code, shown.json()) == (called.status_code, called.json())
    assert shown.status_code == status


def test_the_tokenizer_is_described_as_in_its_configuration(serve: Serve, model_dir: Path) -> None:
    serving = serve(FakeScheduler())
    info = httpx.get(f"{serving.url}/tokenizer_info", timeout=PATIENCE).json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["chat_template"] == TEMPLATE
    assert info["tokenizer_class"]
    assert info["added_tokens_decoder"][str(EOS)]["content"] == "<|im_end|>"
    assert info["added_tokens_decoder"][str(EOS)]["special"] is True
    assert str(model_dir) not in json.dumps(info)


def test_a_ping_has_the_status_of_health_and_no_body(serve: Serve) -> None:
    serving = serve(FakeScheduler())
    for reason, status in (("", 200), ("rank 1 is late", 503)):
        serving.schedulers[0].reason = reason
        for method in ("GET", "POST"):
            reply = httpx.request(method, f"{serving.url}/ping", timeout=PATIENCE)
            assert (reply.status_code, reply.content) == (status, b"")
        assert httpx.get(f"{serving.url}/health", timeout=PATIENCE).status_code == status
