"""A stream's bytes, all of them: what a client reads does not change when the way there does."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler, Script

Saying = Callable[..., tuple[int, ...]]
EXPECTED = Path(__file__).parent / "stream_bytes"
HELLO = [{"role": "user", "content": "hello"}]
USAGE = {"stream_options": {"include_usage": True}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "chat_logprobs_usage": (CHAT, {"logprobs": True, "top_logprobs": 2, **USAGE}),
    "chat_two_choices_stop": (CHAT, {"n": 2, "stop": ["fox ju"], "return_token_ids": True}),
    "chat_stop_token": (CHAT, {"stop_token_ids": [37], **USAGE}),
    "completion": (COMPLETIONS, {"prompt": "the quick"}),
    "completion_logprobs_usage": (COMPLETIONS, {"prompt": [5, 6], "logprobs": 1, **USAGE}),
    "completion_two_choices_stop": (
        COMPLETIONS,
        {"prompt": ["a", "b"], "n": 2, "stop": "ju", "include_stop_str_in_output": True},
    ),
    "completion_token_ids": (COMPLETIONS, {"prompt": "a", "return_token_ids": True, "echo": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_a_stream_are_these(
    serve: Callable[..., Any], saying: Saying, name: str
) -> None:
    path, body = CASES[name]
    tokens = saying('a 🌳 fox jumps\n"över" <|im_start|>')
    serving = serve(FakeScheduler(lambda _: Script(tokens=tokens, num_cached_tokens=2)))
    if path == CHAT:
        body = {"messages": HELLO, **body}
    reply = httpx.post(
        serving.url + path,
        json={"model": "tiny", "stream": True, "max_tokens": 64, **body},
        headers={"X-Request-Id": "pinned"},
    )
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    got = re.sub(rb'"created":\d+', b'"created":0', reply.content)
    assert got.decode() == (EXPECTED / f"{name}.txt").read_text()
