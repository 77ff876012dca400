"""Tools as OpenAI spells them: which functions a call offers, and which the answer may or must use.

Owns `tools`, `tool_choice` and `parallel_tool_calls`, and what of them clashes with the rest.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import JsonValue

from cluster.errors import InvalidRequest

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that an answer may call."""

    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    is_strict: bool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a call says of tools."""

    rendered: list[dict[str, Any]]  # that the model is told of
    functions: tuple[Function, ...]  # that the answer may call
    must_call: bool
    is_parallel: bool

    @property
    def is_enforced(self) -> bool:
        """Whether the form of the calls is more than what the model makes of it."""
        return self.must_call or any(function.is_strict for function in self.functions)


NO_TOOLS = ToolUse([], (), must_call=False, is_parallel=True)
Choice = Literal["none", "auto", "required"]


def tool_use_of(tools: JsonValue, choice: JsonValue, is_parallel: bool | None) -> ToolUse:
    """Return what these parameters ask for; with the choice "none" the model is told of no tools.

    Raises:
        InvalidRequest: naming the parameter and the reason.
    """
    if not tools:
        if tools not in (None, []):
            raise InvalidRequest("tools: must be a list", "tools")
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: there are no tools to choose from", "tool_choice")
        return NO_TOOLS
    if not isinstance(tools, list):
        raise InvalidRequest("tools: must be a list", "tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: at most {MAX_TOOLS}, not {len(tools)}", "tools")
    functions: dict[str, Function] = {}
    for number, tool in enumerate(tools):
        function = _function(tool, f"tools.{number}")
        if function.name in functions:
            raise InvalidRequest(
                f"tools.{number}: there are two functions {function.name!r}", "tools"
            )
        functions[function.name] = function
    must_call, names = _chosen(choice, functions)
    if choice == "none":
        return NO_TOOLS
    return ToolUse(
        rendered=[tool for tool in tools if isinstance(tool, dict)],
        functions=tuple(functions[name] for name in functions if name in names),
        must_call=must_call,
        is_parallel=is_parallel is not False and not _names_one(choice),
    )


def _function(tool: JsonValue, param: str) -> Function:
    kind = tool.get("type") if isinstance(tool, dict) else None
    function = tool.get("function") if isinstance(tool, dict) else None
    if kind != "function":
        raise InvalidRequest(
            f"{param}.type: only tools of type function are supported, not {str(kind)[:60]!r}",
            f"{param}.type",
            "unsupported_parameter",
        )
    if not isinstance(function, dict):
        raise InvalidRequest(f"{param}.function: must be an object", f"{param}.function")
    param += ".function"
    name, strict = function.get("name"), function.get("strict")
    description, parameters = function.get("description"), function.get("parameters")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidRequest(
            f"{param}.name: must be 1 to 128 letters, digits, '_', '-', '.', ':' or '/'",
            f"{param}.name",
        )
    if not isinstance(description, str | None):
        raise InvalidRequest(f"{param}.description: must be a string", f"{param}.description")
    if not isinstance(strict, bool | None):
        raise InvalidRequest(f"{param}.strict: must be a boolean", f"{param}.strict")
    if parameters is None:
        parameters = NO_ARGUMENTS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{param}.parameters: must be a JSON schema of an object", f"{param}.parameters"
        )
    return Function(name, parameters, bool(strict))


def _chosen(choice: JsonValue, functions: dict[str, Function]) -> tuple[bool, set[str]]:
    """Return whether a call must be made, and the names of the functions that may be called."""
    match choice:
        case None | "auto" | "none":
            return False, set(functions)
        case "required":
            return True, set(functions)
        case {"type": "function", "function": {"name": str(name)}}:
            return True, {_known(name, functions)}
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)},
        } if allowed:
            return mode == "required", {_known(_name_of(one), functions) for one in allowed}
    raise InvalidRequest(
        "tool_choice: must be none, auto, required, {'type': 'function', 'function': {'name': "
        "...}} or {'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}",
        "tool_choice",
    )


def _names_one(choice: JsonValue) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "function"


def _name_of(tool: JsonValue) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequest(
        "tool_choice.allowed_tools.tools: must name functions of `tools`", "tool_choice"
    )


def _known(name: str, functions: dict[str, Function]) -> str:
    if name not in functions:
        raise InvalidRequest(
            f"tool_choice: there is no function {name[:128]!r} among the tools", "tool_choice"
        )
    return name
