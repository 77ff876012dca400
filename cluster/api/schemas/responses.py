"""The shapes of OpenAI's responses and stream chunks, as messages that encode themselves.

Owns field names and order. A field that is UNSET is left out.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

LOGPROB_FLOOR = -9999.0  # instead of minus infinity, which JSON cannot say


class PromptTokensDetails(msgspec.Struct):
    """What is known of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """What is known of the answers' tokens."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET  # of a model that thinks


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
    token_logprobs: list[float | None]  # None: the first token of a prompt
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct):
    """What one token had at one place, as vLLM spells it."""

    logprob: float
    rank: int  # among all tokens, from 1
    decoded_token: str


# By token id, of each place of the prompt; None for the first.
PromptLogprobsList = list[dict[str, PromptLogprob] | None]


class FunctionCall(msgspec.Struct):
    """The function of a call, and its arguments as JSON; in a stream a part of them."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    """A call that the model makes."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallPart(msgspec.Struct):
    """What a call grows by: the first part has its id, type and name."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """What the model says, thinks and calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, as vLLM spells it now
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: tuple[int, ...] | None = None


class ChatCompletion(msgspec.Struct):
    """The whole response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: PromptLogprobsList | None = None


class DeltaMessage(msgspec.Struct):
    """What a chat answer grows by."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One answer in a chunk."""

    index: int
    delta: DeltaMessage
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
    """One answer of a completion, whole or what it grows by.

    What was not asked for is null in a whole answer, as vLLM has it, and left out of a stream.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: tuple[int, ...] | None | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsList | None | UnsetType = UNSET


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
