"""`thinking` as Anthropic spells it."""

from dataclasses import dataclass

from pydantic import JsonValue

from cluster.errors import InvalidRequest

MAX_BUDGET = 2**31
_KEYS = {
    "enabled": frozenset({"type", "budget_tokens", "display"}),
    "adaptive": frozenset({"type", "display"}),
    "disabled": frozenset({"type"}),
}
_DISPLAYS = ("summarized", "omitted")


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a call says of thoughts."""

    is_wanted: bool | None = None  # None: nothing is said
    is_shown: bool = False
    budget: int | None = None  # tokens


def thinking_of(value: JsonValue) -> Thinking:
    """Return what `thinking` means.

    Raises:
        InvalidRequest: naming the key and the reason.
    """
    if value is None:
        return Thinking()
    kind = value.get("type") if isinstance(value, dict) else None
    if not (isinstance(value, dict) and isinstance(kind, str) and kind in _KEYS):
        raise InvalidRequest(
            "thinking: must be an object of type enabled, adaptive or disabled", "thinking"
        )
    for name, one in sorted(value.items()):
        if name not in _KEYS[kind] and one is not None:
            param = f"thinking.{name[:100]}"
            raise InvalidRequest(
                f"{param} is not supported with the type {kind}", param, "unsupported_parameter"
            )
    if kind == "disabled":
        return Thinking(is_wanted=False)
    display, budget = value.get("display"), value.get("budget_tokens")
    if display is not None and display not in _DISPLAYS:
        raise InvalidRequest("thinking.display: must be summarized or omitted", "thinking.display")
    if kind == "enabled" and not (type(budget) is int and 1 <= budget <= MAX_BUDGET):
        raise InvalidRequest(
            "thinking.budget_tokens: must be a number of tokens, from 1", "thinking.budget_tokens"
        )
    return Thinking(
        is_wanted=True,
        is_shown=display != "omitted",
        budget=budget if isinstance(budget, int) else None,
    )
