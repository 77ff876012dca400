"""From the content blocks of a Messages call to the turns that a chat template takes.

The one place that knows the types of blocks in a call. Consecutive turns of one role are one turn,
as Anthropic has it, and texts are joined by newlines. The result of a tool is a turn of its own, in
front of what else its message says.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from cluster.errors import InvalidRequest

Role = Literal["user", "assistant", "system"]
# Without effect: whatever prefix is cached is found again, marked or not.
_OF_ALL = frozenset({"type", "cache_control"})
_KNOWN: dict[str, frozenset[str]] = {
    "text": _OF_ALL | {"text"},
    "tool_use": _OF_ALL | {"id", "name", "input", "caller"},
    "tool_result": _OF_ALL | {"tool_use_id", "content", "is_error"},
    "thinking": _OF_ALL | {"thinking", "signature"},
}
# Who may say what.
_ROLES = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}
# Why blocks of other types are refused.
REASONS = {
    "document": "only text is read",
    "image": "only text is read",
    "redacted_thinking": "this server never answers with one",
    "search_result": "only text is read",
    "server_tool_use": "this server runs no tools",
}


@dataclass(slots=True)
class Turn:
    """What one side says until the other does, or the result of one call."""

    role: Role | Literal["tool"]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[JsonValue] = field(default_factory=list)  # as chats have them
    call_id: str | None = None  # whose result it is

    @property
    def content(self) -> str:
        """What it says."""
        return "\n".join(self.texts)


def turns_of(messages: Sequence[tuple[Role, JsonValue]]) -> list[Turn]:
    """Return the turns of (role, content) pairs.

    Raises:
        InvalidRequest: naming the block and the reason.
    """
    turns: list[Turn] = []
    for number, (role, content) in enumerate(messages):
        param = f"messages.{number}.content"
        said, results = Turn(role), []
        for place, block in enumerate(_blocks(content, param)):
            result = _take(block, said, f"{param}.{place}")
            if result is not None:
                results.append(result)
        turns += results
        if results and not said.texts:
            continue
        if turns and turns[-1].role == role:
            turns[-1].texts += said.texts
            turns[-1].thoughts += said.thoughts
            turns[-1].calls += said.calls
        else:
            turns.append(said)
    return turns


def system_turns(system: JsonValue) -> list[Turn]:
    """Return the turn that `system` of a body is, if any; raises as `turns_of`."""
    if system is None or system in ("", []):
        return []
    return [Turn("system", [_text_of(system, "system")])]


def _blocks(content: JsonValue, param: str) -> list[JsonValue]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{param}: must be a string or a list of blocks", param)
    return content


def _text_of(content: JsonValue, param: str) -> str:
    """Return the texts of blocks that may be nothing else."""
    turn = Turn("system")
    for number, block in enumerate(_blocks(content, param)):
        where = f"{param}.{number}"
        kind, _ = _checked(block, where)
        if kind != "text":
            raise _refused(where, kind, "only text is read here")
        _take(block, turn, where)
    return turn.content


def _checked(block: JsonValue, param: str) -> tuple[str, dict[str, JsonValue]]:
    """Return the type of a block, and the block as an object without strange keys."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{param}: must be an object with a type", param)
    if kind not in _KNOWN:
        raise _refused(param, kind, REASONS.get(kind, "it is not known"))
    _refuse_extras(block, _KNOWN[kind], param)
    return kind, block


def _refused(param: str, kind: str, reason: str) -> InvalidRequest:
    message = f"{param}: a block of type {kind[:100]!r} is not supported: {reason}"
    return InvalidRequest(message, f"{param}.type", "unsupported_parameter")


def _take(block: JsonValue, turn: Turn, param: str) -> Turn | None:
    """Add a block to its turn; return the turn of its own that it is, if it is one."""
    kind, block = _checked(block, param)
    role = _ROLES.get(kind, turn.role)
    if turn.role != role:
        raise _refused(param, kind, f"only messages of role {role!r} have one")
    match kind:
        case "text":
            turn.texts.append(_string(block, "text", param))
        case "thinking":
            turn.thoughts.append(_string(block, "thinking", param))
        case "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise InvalidRequest(f"{param}.input: must be an object", f"{param}.input")
            name = _string(block, "name", param)
            function: JsonValue = {"name": name, "arguments": given}
            call_id = _string(block, "id", param)
            turn.calls.append({"id": call_id, "type": "function", "function": function})
        case _:
            content = block.get("content")
            text = "" if content is None else _text_of(content, f"{param}.content")
            return Turn("tool", [text], call_id=_string(block, "tool_use_id", param))
    return None


def _string(block: dict[str, JsonValue], name: str, param: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param}.{name}: must be a string", f"{param}.{name}")
    return value


def _refuse_extras(block: dict[str, JsonValue], known: Iterable[str], where: str) -> None:
    """Raise InvalidRequest for the first key that is not known and says something."""
    for name, value in sorted(block.items()):
        if name not in known and value is not None and value != []:
            param = f"{where}.{name[:100]}"
            raise InvalidRequest(f"{param} is not supported", param, "unsupported_parameter")
