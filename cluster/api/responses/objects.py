"""The shapes of OpenAI's Responses API, as messages that encode themselves.

Owns field names and order: the response, its output, and the events of its stream.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cluster.api.schemas.responses import ChatLogprob

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag="output_text"):
    """A text that the model says."""

    text: str
    logprobs: list[ChatLogprob]
    annotations: tuple[()] = ()


class OutputMessage(msgspec.Struct, tag="message"):
    """A message of the model; the one item of an output."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """A text that the model thinks."""

    text: str


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    """Thoughts of the model."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: tuple[()] = ()


class FunctionCallItem(msgspec.Struct, tag="function_call"):
    """A call that the model makes."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    """What is known of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0  # that cost more than others


class OutputTokensDetails(msgspec.Struct):
    """What is known of the answer's tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class TextFormat(msgspec.Struct, frozen=True):
    """How the text is formed."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    # Of a schema.
    name: str | UnsetType = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType = UNSET
    description: str | UnsetType = UNSET


class TextSettings(msgspec.Struct, frozen=True):
    """What was asked of the text."""

    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] = "medium"


class Reasoning(msgspec.Struct, frozen=True):
    """What was asked of thoughts."""

    effort: str | None = None
    summary: None = None


class Settings(msgspec.Struct, frozen=True):
    """What a response repeats of its call."""

    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    previous_response_id: str | None
    parallel_tool_calls: bool
    store: bool
    temperature: float
    tool_choice: Any  # as it was given
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    tools: list[Any] = []
    reasoning: Reasoning = Reasoning()
    text: TextSettings = TextSettings()


class Response(msgspec.Struct):
    """A response as a whole."""

    id: str
    created_at: int  # seconds since 1970
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    tool_choice: Any
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    object: Literal["response"] = "response"
    reasoning: Reasoning = Reasoning()
    service_tier: Literal["default"] = "default"
    text: TextSettings = TextSettings()
    tools: list[Any] = []


class ResponseEvent(msgspec.Struct):
    """Something became of the response: `response.created` and so on."""

    type: str
    sequence_number: int
    response: Response


class ItemEvent(msgspec.Struct):
    """An item of the output begins or is done."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    item: OutputItem
    output_index: int = 0


class PartEvent(msgspec.Struct):
    """A part of an item begins or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    part: OutputText | ReasoningText
    output_index: int = 0
    content_index: int = 0


class TextDeltaEvent(msgspec.Struct, tag="response.output_text.delta"):
    """What the text grew by."""

    sequence_number: int
    item_id: str
    delta: str
    logprobs: list[ChatLogprob]
    output_index: int = 0
    content_index: int = 0


class TextDoneEvent(msgspec.Struct, tag="response.output_text.done"):
    """The whole text."""

    sequence_number: int
    item_id: str
    text: str
    logprobs: list[ChatLogprob]
    output_index: int = 0
    content_index: int = 0


class ReasoningDeltaEvent(msgspec.Struct, tag="response.reasoning_text.delta"):
    """What the thoughts grew by."""

    sequence_number: int
    item_id: str
    delta: str
    output_index: int = 0
    content_index: int = 0


class ReasoningDoneEvent(msgspec.Struct, tag="response.reasoning_text.done"):
    """All the thoughts."""

    sequence_number: int
    item_id: str
    text: str
    output_index: int = 0
    content_index: int = 0


class ArgumentsDeltaEvent(msgspec.Struct, tag="response.function_call_arguments.delta"):
    """What the arguments of a call grew by."""

    sequence_number: int
    item_id: str
    delta: str
    output_index: int = 0


class ArgumentsDoneEvent(msgspec.Struct, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    sequence_number: int
    item_id: str
    name: str
    arguments: str
    output_index: int = 0


class ErrorEvent(msgspec.Struct, tag="error"):
    """The reading failed, not the response."""

    sequence_number: int
    code: str | None
    message: str
    param: str | None


# What the data of a stream's events is.
EVENTS = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ErrorEvent,
)


class DeletedResponse(msgspec.Struct):
    """The answer to DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
