"""Tools as Anthropic spells them, in the words of chats."""

from typing import Any

from pydantic import JsonValue

from cluster.errors import InvalidRequest

# Of a tool: what else it may have says nothing to the model here.
_KNOWN = frozenset({"type", "name", "description", "input_schema", "strict"})
_IGNORED = frozenset(
    {"cache_control", "input_examples", "eager_input_streaming", "defer_loading", "allowed_callers"}
)


def chat_tools(tools: JsonValue) -> JsonValue:
    """Return `tools` of a chat.

    Raises:
        InvalidRequest: for tools that the server itself would have to run, and what is none.
    """
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise InvalidRequest("tools: must be a list", "tools")
    return [_chat_tool(tool, f"tools.{number}") for number, tool in enumerate(tools)]


def _chat_tool(tool: JsonValue, param: str) -> JsonValue:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{param}: must be an object", param)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequest(
            f"{param}: a tool of type {str(kind)[:100]!r} is not supported: only tools with an "
            "input_schema that the caller runs are",
            f"{param}.type",
            "unsupported_parameter",
        )
    for name, value in sorted(tool.items()):
        if name not in _KNOWN | _IGNORED and value is not None:
            where = f"{param}.{name[:100]}"
            raise InvalidRequest(f"{where} is not supported", where, "unsupported_parameter")
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidRequest(f"{param}.input_schema: must be an object", f"{param}.input_schema")
    function: dict[str, JsonValue] = {
        "name": tool.get("name"),
        "parameters": tool["input_schema"],
    }
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def chat_choice(choice: JsonValue) -> dict[str, Any]:
    """Return `tool_choice` and `parallel_tool_calls` of a chat.

    Raises:
        InvalidRequest: if it is no choice.
    """
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else None
    wrong = InvalidRequest(
        "tool_choice: must be an object of type auto, any, none or tool", "tool_choice"
    )
    if not isinstance(choice, dict) or not isinstance(kind, str):
        raise wrong
    is_single = choice.get("disable_parallel_tool_use")
    if is_single not in (None, True, False):
        param = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequest(f"{param}: must be a boolean", param)
    chosen: JsonValue
    match kind:
        case "auto" | "none":
            chosen = kind
        case "any":
            chosen = "required"
        case "tool" if isinstance(choice.get("name"), str):
            chosen = {"type": "function", "function": {"name": choice["name"]}}
        case _:
            raise wrong
    return {"tool_choice": chosen, "parallel_tool_calls": False if is_single else None}
