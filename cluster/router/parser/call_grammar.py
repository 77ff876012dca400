"""Grammars of answers with tool calls, in the syntax of the model's family.

What they allow, the family's parser takes apart again, and the arguments follow their schemas.
They are in llguidance's Lark. `cluster.router.sandbox.grammars` says whether a grammar can be
followed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cluster.router.parser.json_calls import (
    ARGS,
    HERMES_CLOSE,
    HERMES_OPEN,
    PYTHON_TAG,
    TOOL_CALLS,
)
from cluster.router.parser.json_schemas import ESCAPES, followed
from cluster.router.parser.thoughts import CLOSE, OPEN
from cluster.router.parser.xml_grammar import text_rules, xml_call
from worker.grammar import MAX_GRAMMAR_BYTES

# As models have learned it from Python's json.dumps; without other white space, which a model
# could go on with for ever.
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    **ESCAPES,
}
Thoughts = Literal["none", "possible", "begun"]  # before the answer


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How one model writes calls and thoughts."""

    family: str
    thoughts: Thoughts
    tokens: Mapping[str, int]  # markers that are tokens of their own
    names_first: bool = False  # of mistral: a name, then [ARGS] and the arguments

    @property
    def is_list(self) -> bool:
        """Whether all calls are one list."""
        return self.family == "mistral" and not self.names_first

    @property
    def opening(self) -> tuple[str, str]:
        """The marker before a call or a list of them, if there is one, and what is between two."""
        match self.family:
            case "llama3_json":
                return "", "; "
            case "mistral":
                return TOOL_CALLS, ""
        return HERMES_OPEN, "\n"

    def marker(self, text: str) -> str:
        """Return a marker as a grammar has it."""
        number = self.tokens.get(text)
        return _quoted(text) if number is None else f"<[{number}]>"


def required_calls(
    syntax: CallSyntax, functions: Mapping[str, dict[str, Any]], *, is_parallel: bool
) -> str:
    """Return the grammar of an answer that is one call, or at least one.

    Raises:
        ValueError: if a schema cannot be followed in this syntax.
    """
    marker, between = syntax.opening
    opening = syntax.marker(marker) if marker else ""
    more = f"({_quoted(between)} {opening} unit)*" if is_parallel and not syntax.is_list else ""
    start = f"start: {_thoughts(syntax)} {opening} unit {more}"
    return _grammar(syntax, [start, *_unit_rules(syntax, functions, is_parallel)])


def possible_calls(
    syntax: CallSyntax, functions: Mapping[str, dict[str, Any]], *, is_parallel: bool
) -> str:
    """Return the grammar of any answer whose calls, if it has some, follow their schemas.

    Raises:
        ValueError: as `required_calls`.
    """
    marker, between = syntax.opening
    rules = _unit_rules(syntax, functions, is_parallel)
    if not marker:
        tag = f"{syntax.marker(PYTHON_TAG)}?" if PYTHON_TAG in syntax.tokens else ""
        more = f"({_quoted(between)} unit)*" if is_parallel else ""
        free = r"free: /[^{ \t\r\n](?s:.*)/"
        start = f"start: {_thoughts(syntax)} ({tag} unit {more} | free?)"
        return _grammar(syntax, [start, free, *rules])
    is_token = marker in syntax.tokens
    opened = f"TEXT {syntax.marker(marker)}" if is_token else "opened"
    if not is_token:
        rules.append(f"opened[lazy]: TEXT {_quoted(marker)}")
    many = "*" if is_parallel and not syntax.is_list else "?"
    return _grammar(syntax, [f"start: {_thoughts(syntax)} ({opened} unit){many} TEXT", *rules])


def behind_thoughts(syntax: CallSyntax, grammar: str) -> str:
    """Return a grammar with thoughts before what another one says."""
    inner: dict[str, Any] = {"lark_grammar": grammar}
    if grammar.lstrip().startswith("{"):
        whole = json.loads(grammar)
        if len(whole.get("grammars", ())) != 1:
            raise ValueError("a form of several grammars cannot be behind thoughts")
        (inner,) = whole["grammars"]
    outer = _grammar(syntax, [f"start: {_thoughts(syntax)} @form"])
    return json.dumps({"grammars": [{"lark_grammar": outer}, {**inner, "name": "form"}]})


def _grammar(syntax: CallSyntax, rules: list[str]) -> str:
    is_token = CLOSE in syntax.tokens
    rules.append(f"thought: TEXT {syntax.marker(CLOSE)}" if is_token else "thought: closed")
    if not is_token:
        rules.append(f"closed[lazy]: TEXT {_quoted(CLOSE)}")
    return "\n".join(["%llguidance {}", *rules, r"TEXT: /(?s:.*)/", ""])


def _thoughts(syntax: CallSyntax) -> str:
    match syntax.thoughts:
        case "none":
            return ""
        case "begun":
            return r'thought "\n\n"'
        case "possible":
            return rf'({syntax.marker(OPEN)} thought "\n\n")?'


def _unit_rules(
    syntax: CallSyntax, functions: Mapping[str, dict[str, Any]], is_parallel: bool
) -> list[str]:
    """Return the rules of what is behind an opening: a call, or a list of them."""
    size = len(json.dumps(dict(functions)))
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"{size} characters of schemas are over the limit of {MAX_GRAMMAR_BYTES}")
    is_xml = syntax.family == "qwen3_xml"
    names = [f"call_{number}" for number in range(len(functions))]
    rules = [f"call: {' | '.join(names)}"]
    if syntax.is_list:
        more = f"({_quoted(', ')} call)*" if is_parallel else ""
        rules.append(f"unit: {_quoted(' [')} call {more} {_quoted(']')}")
    else:
        rules.append("unit: call")
    if is_xml:
        rules += text_rules()
    for rule, (name, schema) in zip(names, functions.items(), strict=True):
        parts = xml_call(name, schema) if is_xml else _json_call(syntax, name, schema)
        end = syntax.marker(HERMES_CLOSE) if syntax.opening[0] == HERMES_OPEN else ""
        rules.append(f"{rule}: {' '.join(parts)} {end}")
    return rules


def _json_call(syntax: CallSyntax, name: str, schema: dict[str, Any]) -> list[str]:
    whole = {"type": "object", **followed(schema), "x-guidance": JSON_STYLE}
    arguments = f"%json {json.dumps(whole)}"
    if syntax.names_first:
        return [_quoted(name), syntax.marker(ARGS), arguments]
    key = "parameters" if syntax.family == "llama3_json" else "arguments"
    head = f'{{"name": {json.dumps(name)}, "{key}": '
    if syntax.family == "hermes":
        return [_quoted("\n" + head), arguments, _quoted("}\n")]
    return [_quoted(head), arguments, _quoted("}")]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
