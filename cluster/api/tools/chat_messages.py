"""The messages of a chat whose answers are taken apart, as OpenAI and vLLM spell them."""

from hashlib import blake2b

from msgspec import UNSET

from cluster.api.schemas.responses import (
    ChatMessage,
    DeltaMessage,
    FunctionCall,
    ToolCall,
    ToolCallPart,
)
from cluster.request import FinishReason
from cluster.router.parser.families import MessageFormat, MessageParser
from cluster.router.parser.message import MessageDelta, ToolCallDelta

_OF_MISTRAL = 9  # letters and digits that its templates want of an id


def call_id(response_id: str, choice: int, index: int, tool_calls: str) -> str:
    """Return the id of a call: the same for the same place in the same response."""
    digest = blake2b(f"{response_id}/{choice}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:_OF_MISTRAL] if tool_calls == "mistral" else f"call_{digest}"


class ParsedMessages:
    """Takes the choices of one call apart."""

    def __init__(self, message_format: MessageFormat, response_id: str) -> None:
        self._format = message_format
        self._response_id = response_id
        self._parsers: dict[int, MessageParser] = {}

    def grow(self, choice: int, text: str, ends: bool) -> MessageDelta:
        """Take the next text of a choice; return what is certain now."""
        if choice not in self._parsers:
            self._parsers[choice] = MessageParser(self._format)
        return self._parsers[choice].feed(text, ends=ends)

    def whole(self, choice: int, text: str) -> ChatMessage:
        """Return the message of a choice that has ended."""
        message = self.grow(choice, text, ends=True)
        calls = [
            ToolCall(self._id(choice, call), FunctionCall(call.arguments, call.name or ""))
            for call in message.tool_calls
        ]
        is_silent = not message.content and (calls or message.reasoning)
        return ChatMessage(
            content=None if is_silent else message.content,
            reasoning_content=message.reasoning or UNSET,
            reasoning=message.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def delta(self, choice: int, message: MessageDelta, is_first: bool) -> DeltaMessage:
        """Return what a choice grew by."""
        parts = [self._part(choice, call) for call in message.tool_calls]
        return DeltaMessage(
            role="assistant" if is_first else UNSET,
            content=message.content if message.content or is_first else UNSET,
            reasoning_content=message.reasoning or UNSET,
            reasoning=message.reasoning or UNSET,
            tool_calls=parts or UNSET,
        )

    def finish_reason(self, choice: int, reason: FinishReason | None) -> str | None:
        """Return why a choice ended; an answer that ends by itself after calls ends for them."""
        has_called = choice in self._parsers and self._parsers[choice].num_calls > 0
        return "tool_calls" if reason == "stop" and has_called else reason

    def _part(self, choice: int, call: ToolCallDelta) -> ToolCallPart:
        if call.name is None:
            return ToolCallPart(call.index, FunctionCall(call.arguments))
        return ToolCallPart(
            call.index,
            FunctionCall(call.arguments, call.name),
            id=self._id(choice, call),
            type="function",
        )

    def _id(self, choice: int, call: ToolCallDelta) -> str:
        return call_id(self._response_id, choice, call.index, self._format.tool_calls)
