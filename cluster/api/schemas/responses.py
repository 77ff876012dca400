"""The shapes of OpenAI's responses and stream chunks, as messages that encode themselves.

Owns field names and order. A field that is UNSET is left out. Knows nothing of how the values
come about.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cluster.router.output_processor import OutputProcessor


class PromptTokensDetails(msgspec.Struct):
    """What is known of the prompt's tokens."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A token of a chat answer with its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The tokens of a chat answer."""

    content: list[ChatLogprob]


class CompletionLogprobs(msgspec.Struct):
    """The tokens of a completion; offsets are in characters of its text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class ChatMessage(msgspec.Struct):
    """What the model says."""

    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(msgspec.Struct):
    """One answer of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The whole response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chat answer grows by."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One answer in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a stream of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One answer of a completion, whole or what it grows by."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The response of /v1/completions, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | None | UnsetType = UNSET


class ModelCard(msgspec.Struct):
    """One entry of /v1/models; an adapter's parent is the base model."""

    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "topwork"


class ModelList(msgspec.Struct):
    """The response of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


def usage_of(prompts: Sequence[Sequence[OutputProcessor]]) -> Usage:
    """Return the counts of a call: each prompt once, and all its answers, shown or not.

    The first answer to a prompt computes it for the others, so its cached tokens are the prompt's.
    """
    num_prompt_tokens = sum(len(answers[0].request.token_ids) for answers in prompts)
    num_tokens = sum(answer.num_tokens for answers in prompts for answer in answers)
    num_cached = sum(answers[0].num_cached_tokens for answers in prompts)
    return Usage(
        num_prompt_tokens,
        num_tokens,
        num_prompt_tokens + num_tokens,
        PromptTokensDetails(num_cached),
    )


def sse(message: object) -> bytes:
    """Return a message as one server-sent event."""
    return b"data: " + _encode(message) + b"\n\n"


class Mould:
    """An event of a stream of which nothing changes but its text and its tokens."""

    def __init__(self, make: Callable[[str, tuple[int, ...]], object]) -> None:
        # What a client chose stands before these two places, so the last ones found are they.
        whole = sse(make(_SOME_TEXT, _SOME_TOKENS))
        rest, self._tells_tokens, tokens_end = whole.rpartition(_encode(_SOME_TOKENS))
        self._start, found, text_end = (rest or tokens_end).rpartition(_encode(_SOME_TEXT))
        assert found, "a mould without a place for the text"
        self._middle = text_end if self._tells_tokens else b""
        self._end = tokens_end if self._tells_tokens else text_end

    def cast(self, text: str, token_ids: tuple[int, ...]) -> bytes:
        """Return the event with this text and, if it tells any, these tokens."""
        if self._tells_tokens:
            tokens = _encode(token_ids)
            return b"".join((self._start, _encode(text), self._middle, tokens, self._end))
        return b"".join((self._start, _encode(text), self._end))


_encode = msgspec.json.Encoder().encode
_SOME_TEXT = "\0text\0"
_SOME_TOKENS = (-(2**62), 2**62)


SSE_DONE = b"data: [DONE]\n\n"
