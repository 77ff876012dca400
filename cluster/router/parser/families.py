"""Which parser a model's answers need: by name, or by what its chat template says.

The rule for calls, the first that holds: a template with `<function=` and `<parameter=` is
`qwen3_xml`, one with `<tool_call>` is `hermes`, one with `[TOOL_CALLS]` is `mistral`, one with
`<|python_tag|>` or with both `"parameters"` and `"name"` as Llama's prompts have them is
`llama3_json`. A template with `</think>` has thoughts. Templates whose calls or thoughts look
otherwise have no parser: their answers are content.
"""

from typing import Any

import msgspec

from cluster.router.parser.json_calls import (
    ARGS,
    CALL_ID,
    HERMES_CLOSE,
    HERMES_OPEN,
    PYTHON_TAG,
    TOOL_CALLS,
    hermes,
    llama3_json,
    mistral,
)
from cluster.router.parser.message import Collector, MessageDelta
from cluster.router.parser.text_source import Steps, TextSource
from cluster.router.parser.thoughts import CLOSE, OPEN, thoughts
from cluster.router.parser.xml_calls import qwen3_xml

# By vLLM's names; several are one way to write.
TOOL_CALL_PARSERS = {
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "mistral": "mistral",
    "qwen3_coder": "qwen3_xml",
    "qwen3_xml": "qwen3_xml",
}
# Whether the answer begins in a thought whatever the prompt says.
REASONING_PARSERS = {"qwen3": False, "deepseek_r1": True}
BY_SCHEMA = frozenset({"qwen3_xml"})  # whose arguments are read as their schemas say
DEFAULT_TOOL_CALLS = "hermes"  # in which a model without a syntax of its own is made to call
# What must be seen of an answer, also where it is a special token.
_MARKERS: dict[str, tuple[str, ...]] = {
    "": (),
    "hermes": (HERMES_OPEN, HERMES_CLOSE),
    "llama3_json": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS, ARGS, CALL_ID),
    "qwen3_xml": (HERMES_OPEN, HERMES_CLOSE),
}
ALL_MARKERS = tuple(sorted({OPEN, CLOSE, *(one for some in _MARKERS.values() for one in some)}))


class MessageFormat(msgspec.Struct, frozen=True):
    """How the text of an answer is taken apart; goes with a stream to whoever reads it on."""

    tool_calls: str = ""  # the way calls are written; "": there are none
    functions: dict[
        str, dict[str, Any]
    ] = {}  # that are offered, with schemas for those of `BY_SCHEMA`
    is_parallel: bool = True  # else one call at most
    reasoning: str = ""  # the name of a parser; "": there are no thoughts
    begins_in_thought: bool = False
    shows_reasoning: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """What must be seen, also where it is a special token."""
        return _MARKERS[self.tool_calls] + ((OPEN, CLOSE) if self.reasoning else ())


class MessageParser:
    """Takes one answer apart as it grows; its deltas joined do not depend on how it is cut."""

    def __init__(self, message_format: MessageFormat) -> None:
        self._source = TextSource()
        self._out = Collector(
            is_parallel=message_format.is_parallel,
            shows_reasoning=message_format.shows_reasoning,
        )
        self._parsing = _parsing(message_format, self._source, self._out)
        next(self._parsing)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._out.num_calls

    def feed(self, text: str, *, ends: bool = False) -> MessageDelta:
        """Take the next text, or the last; return what is now certain."""
        if text:
            self._source.add(text)
            next(self._parsing)
        if ends:
            self._source.has_ended = True
            for _ in self._parsing:
                raise AssertionError("a parser waits for text at the end")
        return self._out.fetch()


def _parsing(form: MessageFormat, source: TextSource, out: Collector) -> Steps[None]:
    if form.reasoning:
        yield from thoughts(source, out, is_open=form.begins_in_thought)
    match form.tool_calls:
        case "hermes":
            yield from hermes(source, out, form.functions)
        case "llama3_json":
            yield from llama3_json(source, out, form.functions)
        case "mistral":
            yield from mistral(source, out, form.functions)
        case "qwen3_xml":
            yield from qwen3_xml(source, out, form.functions)
    yield from source.rest(out.content)


def tool_call_parser(name: str, template: str) -> str:
    """Return how the calls of a model are written, "" if it makes none.

    Args:
        name: of a parser, none, or auto: what the chat template says.
        template: the source of the chat template.
    """
    if name != "auto":
        return "" if name == "none" else TOOL_CALL_PARSERS[name]
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_xml"
    if HERMES_OPEN in template:
        return "hermes"
    if TOOL_CALLS in template:
        return "mistral"
    is_llama = '"parameters"' in template and '"name"' in template and "tools" in template
    return "llama3_json" if PYTHON_TAG in template or is_llama else ""


def reasoning_parser(name: str, template: str) -> str:
    """Return the name of the parser of a model's thoughts, "" for none; as `tool_call_parser`."""
    if name != "auto":
        return "" if name == "none" else name
    return "qwen3" if CLOSE in template else ""


def opens_thought(prompt: str) -> bool:
    """Tell whether a rendered prompt ends in a thought that it has opened."""
    return prompt.rstrip().endswith(OPEN)
