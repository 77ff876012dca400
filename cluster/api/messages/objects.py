"""The shapes of Anthropic's Messages API, as messages that encode themselves.

Owns field names and order: the message, the events of its stream, and errors.
"""

from typing import Any, Literal

import msgspec

from cluster.errors import TopworkError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

# Anthropic's words for a status; another one is an error of ours.
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class TextBlock(msgspec.Struct, tag="text"):
    """A text that the model says."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """What the model thinks; nothing needs to be signed here."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call that the model makes."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """Counts of tokens; the prompt's are the sum of the three of its input."""

    input_tokens: int  # that were computed
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0  # that cost more than others


class Message(msgspec.Struct, tag="message"):
    """An answer, or the beginning of one."""

    id: str
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


class MessageStart(msgspec.Struct, tag="message_start"):
    """An answer begins."""

    message: Message


class BlockStart(msgspec.Struct, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Block


class Ping(msgspec.Struct, tag="ping"):
    """The stream is alive."""


class TextDelta(msgspec.Struct, tag="text_delta"):
    """What a text grew by."""

    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    """What a thought grew by."""

    thinking: str


class InputDelta(msgspec.Struct, tag="input_json_delta"):
    """What the arguments of a call grew by: a piece of JSON."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(msgspec.Struct, tag="content_block_stop"):
    """A block is whole."""

    index: int


class MessageChange(msgspec.Struct):
    """What is known of an answer at its end."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    """An answer has ended so."""

    delta: MessageChange
    usage: MessageUsage  # of the whole


class MessageStop(msgspec.Struct, tag="message_stop"):
    """Nothing follows."""


class ErrorDetail(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class ErrorBody(msgspec.Struct, tag="error"):
    """A failed call, or the last event of a stream that broke off."""

    error: ErrorDetail
    request_id: str


# What the data of a stream's events is.
EVENTS = (
    MessageStart,
    BlockStart,
    Ping,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    ErrorBody,
)


class TokenCount(msgspec.Struct):
    """The answer to POST /v1/messages/count_tokens."""

    input_tokens: int


def message_error(error: TopworkError, request_id: str) -> ErrorBody:
    """Return an error in Anthropic's shape."""
    return ErrorBody(
        ErrorDetail(ERROR_TYPES.get(error.status, "api_error"), error.message), request_id
    )
