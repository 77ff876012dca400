"""Long responses are the same bytes, spelled some entries at a time."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import json

from cluster.api import long_responses
from cluster.api.long_responses import encoded
from cluster.api.schemas.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TopLogprob,
    Usage,
)

USAGE = Usage(1, 2, 3)
SIZES = [0, 1, 3, 4, 7, 600]


def chat(size: int) -> ChatCompletion:
    best = [TopLogprob("é", -1.0, [195, 169])]
    content = [ChatLogprob(f"t{n}", -0.5, [116], best) for n in range(size)]
    choices = [
        ChatChoice(0, ChatMessage("a"), ChatLogprobs(content), "stop", None),
        ChatChoice(1, ChatMessage("b"), None, "stop", None, token_ids=tuple(range(size))),
    ]
    return ChatCompletion("id", 1, "model", choices, USAGE, prompt_token_ids=tuple(range(size)))


def completion(size: int) -> Completion:
    shape = CompletionLogprobs(
        [*range(size)], [-0.5] * size, ['"'] * size, [{"a": -1.0, "b": -2.0}] * size
    )
    return Completion("id", 1, "model", [CompletionChoice(0, "a", shape, "stop", None)])


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("size", SIZES)
def test_a_response_is_spelled_as_it_would_be_at_once(
    make: Callable[[int], Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_responses, "AT_ONCE", 3)
    assert encoded(make(size)) == json.encode(make(size))
