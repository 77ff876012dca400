"""The parts of a conversation that come from tools: calls, their results, and thoughts.

Templates take the arguments of a call as an object, so text that is one becomes it.
"""

from typing import Any

import msgspec
from pydantic import JsonValue

from cluster.api.schemas.requests import Message
from cluster.errors import InvalidRequest
from cluster.router.bodies.validation import num_values

MAX_CALLS = 512  # of one message
MAX_VALUES = 262_144  # of the arguments of a conversation: see `http.read_body`


class ToolTurns:
    """Checks the calls of one conversation."""

    def __init__(self) -> None:
        self._num_values = 0

    def fields_of(self, message: Message, param: str) -> dict[str, Any]:
        """Return what a turn has beside its role, content and name.

        Raises:
            InvalidRequest: naming the part and the reason.
        """
        fields: dict[str, Any] = {}
        if message.tool_calls not in (None, []):
            if message.role != "assistant":
                raise InvalidRequest(
                    f"{param}.tool_calls: only of the assistant's messages", f"{param}.tool_calls"
                )
            fields["tool_calls"] = self._calls(message.tool_calls, f"{param}.tool_calls")
        if message.tool_call_id is not None:
            if message.role != "tool":
                raise InvalidRequest(
                    f"{param}.tool_call_id: only of messages of role tool", f"{param}.tool_call_id"
                )
            fields["tool_call_id"] = message.tool_call_id
        thoughts = message.reasoning_content or message.reasoning
        if thoughts:
            fields["reasoning_content"] = fields["reasoning"] = thoughts
        return fields

    def _calls(self, value: JsonValue, param: str) -> list[dict[str, Any]]:
        if not isinstance(value, list) or len(value) > MAX_CALLS:
            raise InvalidRequest(f"{param}: must be a list of at most {MAX_CALLS} calls", param)
        return [self._call(one, f"{param}.{number}") for number, one in enumerate(value)]

    def _call(self, value: JsonValue, param: str) -> dict[str, Any]:
        call = value if isinstance(value, dict) else {}
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, dict):
            raise InvalidRequest(f"{param}: must be a call of type function", param)
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str):
            raise InvalidRequest(f"{param}.function.name: must be a string", f"{param}.function")
        if arguments is None or arguments == "":
            arguments = {}
        if isinstance(arguments, str):
            self._num_values += num_values(arguments.encode(), MAX_VALUES)
            if self._num_values > MAX_VALUES:
                raise InvalidRequest(
                    f"messages: the arguments of calls have more than {MAX_VALUES} values",
                    "messages",
                )
            arguments = object_of(arguments)
        elif not isinstance(arguments, dict):
            raise InvalidRequest(
                f"{param}.function.arguments: must be a string of JSON", f"{param}.function"
            )
        made: dict[str, Any] = {
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        if call.get("id") is not None:
            made["id"] = call["id"]
        return made


def object_of(text: str) -> Any:
    """Return the object that arguments are, or what the model said instead."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return text
    return value if isinstance(value, dict) else text
