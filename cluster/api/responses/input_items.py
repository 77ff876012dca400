"""The input of a stored response, as items: the conversation that its answer goes on with."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from cluster.api.responses.items import Turn
from cluster.api.responses.objects import (
    FunctionCallItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from cluster.errors import InvalidRequest

MAX_LIMIT = 100
DEFAULT_LIMIT = 20
Order = Literal["asc", "desc"]


class InputText(msgspec.Struct, tag="input_text"):
    """A text that the model reads."""

    text: str


class InputMessage(msgspec.Struct, tag="message"):
    """A turn that is not the model's."""

    id: str
    role: str
    content: list[InputText]
    status: Literal["completed"] = "completed"


class FunctionCallOutputItem(msgspec.Struct, tag="function_call_output"):
    """What a function has given."""

    id: str
    call_id: str
    output: str
    status: Literal["completed"] = "completed"


InputItem = InputMessage | OutputMessage | ReasoningItem | FunctionCallItem | FunctionCallOutputItem


class InputItemList(msgspec.Struct):
    """A page of them; `last_id` is what the next one comes `after`."""

    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def input_items(response_id: str, turns: list[Turn]) -> list[InputItem]:
    """Return the items of a conversation; an id follows from its place."""
    suffix = response_id.removeprefix("resp_")
    items: list[InputItem] = []
    for turn in turns:
        for prefix, make in _parts(turn):
            items.append(make(f"{prefix}_{suffix}_in{len(items)}"))
    return items


def page_of(items: list[InputItem], limit: int, order: Order, after: str | None) -> InputItemList:
    """Return the items behind one.

    Raises:
        InvalidRequest: if there is no such item.
    """
    ordered = items if order == "asc" else items[::-1]
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item.id == after]
        if not places:
            raise InvalidRequest(f"after: there is no item {after[:100]!r}", "after")
        start = places[0] + 1
    page = ordered[start : start + limit]
    return InputItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(ordered) > start + limit,
    )


def _parts(turn: Turn) -> Iterator[tuple[str, Any]]:
    """Yield for each item of a turn the prefix of its id, and what makes it of that."""
    role, text = turn["role"], turn["content"]
    if role == "tool":
        yield "fco", lambda name: FunctionCallOutputItem(name, turn["tool_call_id"], text)
        return
    if role != "assistant":
        yield "msg", lambda name: InputMessage(name, role, [InputText(text)])
        return
    thoughts, calls = turn.get("reasoning_content"), turn.get("tool_calls", ())
    if thoughts:
        yield "rs", lambda name: ReasoningItem(name, "completed", [ReasoningText(thoughts)])
    if text or not (thoughts or calls):
        yield "msg", lambda name: OutputMessage(name, "completed", [OutputText(text, [])])
    for call in calls:
        yield "fc", _maker(call)


def _maker(call: dict[str, Any]) -> Any:
    function = call["function"]
    return lambda name: FunctionCallItem(
        name, call["id"], function["name"], function["arguments"], "completed"
    )
