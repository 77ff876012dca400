"""From the items of a Responses call to the turns that a chat template takes.

Messages keep their role; function calls become `tool_calls` of the assistant's turn, their outputs
turns of the role `tool`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import JsonValue

from cluster.api.prompts.tool_turns import object_of
from cluster.api.responses.body import MAX_VALUES
from cluster.api.schemas.requests import MAX_MESSAGES
from cluster.errors import InvalidRequest
from cluster.router.bodies.validation import num_values

Turn = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
MAX_NAME_LENGTH = 256  # characters of the name or the id of a function call
# What items and parts carry when they come from an answer; it says nothing to the model.
_OF_ITEMS = frozenset({"type", "id", "status", "phase"})
_OF_PARTS = frozenset({"type", "annotations", "logprobs"})
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}


def turns_of(value: JsonValue) -> list[Turn]:
    """Return the turns of the `input` of a body.

    Raises:
        InvalidRequest: naming the item and the reason.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise InvalidRequest("input: must be a string or a list of items", "input")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidRequest(f"input: must have 1 to {MAX_MESSAGES} items", "input")
    turns: list[Turn] = []
    for number, item in enumerate(value):
        _add(turns, item, f"input.{number}")
    if not turns:
        raise InvalidRequest("input: there is nothing in it that the model would read", "input")
    return turns


def for_template(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns with the arguments of their tool calls as templates take them: as objects.

    Raises:
        InvalidRequest: if those have too many values, taken together.
    """
    calls = (call for turn in turns for call in turn.get("tool_calls", ()))
    total = 0
    for call in calls:
        total += num_values(call["function"]["arguments"].encode(), MAX_VALUES)
        if total > MAX_VALUES:
            message = f"input: the arguments have more than {MAX_VALUES} values"
            raise InvalidRequest(message, "input")
    return [_with_objects(turn) if "tool_calls" in turn else turn for turn in turns]


def _with_objects(turn: Turn) -> Turn:
    calls = []
    for call in turn["tool_calls"]:
        function = call["function"]
        arguments = object_of(function["arguments"])
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**turn, "tool_calls": calls}


def _add(turns: list[Turn], item: JsonValue, param: str) -> None:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{param}: must be an object", param)
    match item.get("type", "message"):
        case "message":
            message = _message(item, param)
            if message["role"] == "assistant" and turns and _is_thought(turns[-1]):
                turns[-1]["content"] = message["content"]
            else:
                turns.append(message)
        case "reasoning":
            thoughts = _thoughts(item, param)
            if thoughts:
                turns.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
        case "function_call":
            if not (turns and turns[-1]["role"] == "assistant"):
                turns.append({"role": "assistant", "content": ""})
            turns[-1].setdefault("tool_calls", []).append(_tool_call(item, param))
        case "function_call_output":
            _refuse_extras(item, _OF_ITEMS | {"call_id", "output"}, param)
            turns.append(
                {
                    "role": "tool",
                    "tool_call_id": _name(item, "call_id", param),
                    "content": _content(item.get("output"), f"{param}.output"),
                }
            )
        case kind:
            raise InvalidRequest(
                f"{param}.type: only message, function_call, function_call_output and "
                f"reasoning are supported, not {str(kind)[:100]!r}",
                f"{param}.type",
                "unsupported_parameter",
            )


def _is_thought(turn: Turn) -> bool:
    return "reasoning_content" in turn and not turn["content"] and "tool_calls" not in turn


def _thoughts(item: dict[str, JsonValue], param: str) -> str:
    """Return the thoughts of an earlier answer; a summary of them is not what the model thought."""
    _refuse_extras(item, _OF_ITEMS | {"content", "summary", "encrypted_content"}, param)
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise InvalidRequest(f"{param}.content: must be a list of parts", f"{param}.content")
    texts = []
    for number, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not (isinstance(part, dict) and part.get("type") == "reasoning_text") or not isinstance(
            text, str
        ):
            where = f"{param}.content.{number}"
            raise InvalidRequest(f"{where}: must be a part of type reasoning_text", where)
        texts.append(text)
    return "\n".join(texts)


def _message(item: dict[str, JsonValue], param: str) -> Turn:
    _refuse_extras(item, _OF_ITEMS | {"role", "content"}, param)
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{param}.role: must be one of {', '.join(ROLES)}", f"{param}.role")
    return {"role": role, "content": _content(item.get("content"), f"{param}.content")}


def _tool_call(item: dict[str, JsonValue], param: str) -> dict[str, Any]:
    _refuse_extras(item, _OF_ITEMS | {"call_id", "name", "arguments"}, param)
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise InvalidRequest(f"{param}.arguments: must be a string", f"{param}.arguments")
    function = {"name": _name(item, "name", param), "arguments": arguments}
    return {"id": _name(item, "call_id", param), "type": "function", "function": function}


def _name(item: dict[str, JsonValue], key: str, param: str) -> str:
    value = item.get(key)
    if not (isinstance(value, str) and 1 <= len(value) <= MAX_NAME_LENGTH):
        raise InvalidRequest(
            f"{param}.{key}: must be a string of 1 to {MAX_NAME_LENGTH} characters",
            f"{param}.{key}",
        )
    return value


def _content(value: JsonValue, param: str) -> str:
    """Return a text, or parts of text joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{param}: must be a string or a list of parts of text", param)
    return "\n".join(_part(part, f"{param}.{number}") for number, part in enumerate(value))


def _part(part: JsonValue, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if not isinstance(part, dict) or key is None:
        raise InvalidRequest(
            f"{param}: only parts of type input_text and output_text are supported", param
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}.{key}: must be a string", f"{param}.{key}")
    _refuse_extras(part, _OF_PARTS | {key}, param)
    return text


def _refuse_extras(value: dict[str, JsonValue], known: Iterable[str], where: str) -> None:
    """Raise InvalidRequest for the first key that is not known and says something."""
    for name, one in sorted(value.items()):
        if name not in known and one is not None and one != []:
            param = f"{where}.{name[:100]}"
            raise InvalidRequest(f"{param} is not supported", param, "unsupported_parameter")
