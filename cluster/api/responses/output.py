"""The items of a response's output as they grow: messages, thoughts and calls in their order."""

from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.api.responses.objects import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ReasoningItem,
    ReasoningText,
    TextDeltaEvent,
    TextDoneEvent,
)
from cluster.api.schemas.responses import ChatLogprob

Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass(slots=True)
class Item:
    """One item of an output."""

    kind: Kind
    index: int  # in the output
    id: str
    call_id: str = ""
    name: str = ""  # of the function
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)
    status: ItemStatus | None = None  # that it has ended with

    @property
    def text(self) -> str:
        """What it says so far."""
        return "".join(self.texts)

    def spelled(self, status: ItemStatus) -> OutputItem:
        """Return the item as it is now."""
        match self.kind:
            case "message":
                return OutputMessage(self.id, status, [OutputText(self.text, self.logprobs)])
            case "reasoning":
                return ReasoningItem(self.id, status, [ReasoningText(self.text)])
        return FunctionCallItem(self.id, self.call_id, self.name, self.text, status)

    def empty(self) -> OutputItem:
        """Return the item as it begins."""
        match self.kind:
            case "message":
                return OutputMessage(self.id, "in_progress", [])
            case "reasoning":
                return ReasoningItem(self.id, "in_progress", [])
        return FunctionCallItem(self.id, self.call_id, self.name, "", "in_progress")

    def part(self, *, is_whole: bool) -> OutputText | ReasoningText | None:
        """Return the one part of the item, as it begins or as it is; a call has none."""
        match self.kind:
            case "message":
                return OutputText(self.text, self.logprobs) if is_whole else OutputText("", [])
            case "reasoning":
                return ReasoningText(self.text if is_whole else "")
        return None

    def delta(self, number: int, text: str, logprobs: list[ChatLogprob]) -> Any:
        """Return the event of what it grew by."""
        match self.kind:
            case "message":
                return TextDeltaEvent(number, self.id, text, logprobs, self.index)
            case "reasoning":
                return ReasoningDeltaEvent(number, self.id, text, self.index)
        return ArgumentsDeltaEvent(number, self.id, text, self.index)

    def done(self, number: int) -> Any:
        """Return the event of its whole text."""
        match self.kind:
            case "message":
                return TextDoneEvent(number, self.id, self.text, self.logprobs, self.index)
            case "reasoning":
                return ReasoningDoneEvent(number, self.id, self.text, self.index)
        return ArgumentsDoneEvent(number, self.id, self.name, self.text, self.index)


def new_item(kind: Kind, index: int, response_id: str, call_id: str = "", name: str = "") -> Item:
    """Return an item that begins; its id follows from its place."""
    suffix = f"_{index}" if index else ""
    item_id = f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{suffix}"
    return Item(kind, index, item_id, call_id, name)


def turn_of(items: list[Item]) -> dict[str, Any]:
    """Return the assistant's turn that these items are."""
    texts: dict[Kind, str] = {
        kind: "".join(item.text for item in items if item.kind == kind)
        for kind in ("message", "reasoning")
    }
    turn: dict[str, Any] = {"role": "assistant", "content": texts["message"]}
    if texts["reasoning"]:
        turn["reasoning_content"] = texts["reasoning"]
    calls = [
        {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.text},
        }
        for item in items
        if item.kind == "function_call"
    ]
    return turn | {"tool_calls": calls} if calls else turn
