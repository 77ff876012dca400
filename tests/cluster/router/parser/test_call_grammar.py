"""Grammars of calls: what they allow, the parser of the same family reads as valid calls."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.router.parser.call_grammar import (
    CallSyntax,
    behind_thoughts,
    possible_calls,
    required_calls,
)
from cluster.router.parser.families import MessageFormat, MessageParser

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "when": {"$ref": "#/$defs/when"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"when": {"type": "object", "properties": {"h": {"type": "integer"}}}},
}
FUNCTIONS = {
    "get_weather": SCHEMA,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]")
WEATHER = '{"city": "Zürich", "days": 2}'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
XML_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def hermes(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE: dict[str, tuple[str, str]] = {  # one call, and two
    "hermes": (hermes(WEATHER), hermes(WEATHER) + "\n" + hermes("{}", "now")),
    "llama3_json": (
        f'{{"name": "get_weather", "parameters": {WEATHER}}}',
        f'{{"name": "get_weather", "parameters": {WEATHER}}}; '
        '{"name": "now", "parameters": {}}',
    ),
    "mistral": (
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}]',
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    "named": (
        f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}",
        f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]now[ARGS]{{}}",
    ),
    "qwen3_xml": (XML, XML + "\n" + XML_NOW),
}


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "tokens"])
def with_tokens(request: pytest.FixtureRequest) -> bool:
    """Whether markers are tokens of their own."""
    return bool(request.param)


@pytest.fixture(scope="module")
def vocabulary(model_dir: Path, with_tokens: bool) -> tuple[LLTokenizer, dict[str, int]]:
    raw = json.loads((model_dir / "tokenizer.json").read_text())
    first = 1 + max(raw["model"]["vocab"].values())
    tokens = {text: first + number for number, text in enumerate(MARKERS)} if with_tokens else {}
    like = raw["added_tokens"][0]
    raw["added_tokens"] += [
        like | {"id": number, "content": text, "special": text.startswith("[")}
        for text, number in tokens.items()
    ]
    return LLTokenizer(json.dumps(raw), n_vocab=first + len(tokens), eos_token=[2]), tokens


@pytest.fixture(scope="module")
def allows(vocabulary: tuple[LLTokenizer, dict[str, int]]) -> Callable[[str, str], bool]:
    """Return a function that says whether a text is a whole answer of a grammar."""
    tokenizer, added = vocabulary

    def answer(grammar: str, text: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens: list[int] = []
        while text:
            found = [marker for marker in added if text.startswith(marker)]
            if found:
                tokens.append(added[found[0]])
                text = text.removeprefix(found[0])
                continue
            end = min([at for marker in added if (at := text.find(marker)) >= 0], default=len(text))
            tokens += tokenizer.tokenize_str(text[:end])
            text = text[end:]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return answer


@pytest.fixture
def syntax(vocabulary: tuple[LLTokenizer, dict[str, int]]) -> Callable[..., CallSyntax]:
    def make(family: str, thoughts: Any = "none") -> CallSyntax:
        names_first = family == "named"
        return CallSyntax(
            "mistral" if names_first else family, thoughts, vocabulary[1], names_first
        )

    return make


@pytest.mark.parametrize("family", ONE)
def test_a_required_call_is_one_or_several_and_nothing_else(
    family: str, syntax: Callable[..., CallSyntax], allows: Callable[[str, str], bool]
) -> None:
    one, two = ONE[family]
    many = required_calls(syntax(family), FUNCTIONS, is_parallel=True)
    single = required_calls(syntax(family), FUNCTIONS, is_parallel=False)
    assert [allows(many, text) for text in (one, two, "", "hello", one[:-3])] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert [allows(single, text) for text in (one, two)] == [True, False]
    for wrong in (one.replace("2", "10"), one.replace("days", "day"), one.replace("get_", "")):
        assert not allows(many, wrong)


@pytest.mark.parametrize("family", ONE)
def test_a_possible_call_is_valid_or_none_at_all(
    family: str, syntax: Callable[..., CallSyntax], allows: Callable[[str, str], bool]
) -> None:
    one, two = ONE[family]
    grammar = possible_calls(syntax(family), FUNCTIONS, is_parallel=True)
    assert [allows(grammar, text) for text in ("", "hello { <", one, two)] == [True] * 4
    assert not allows(grammar, one.replace("2", "10"))
    if family != "llama3_json":
        assert allows(grammar, f"I look.\n{one}")


@pytest.mark.parametrize("family", ONE)
def test_what_a_grammar_allows_its_parser_reads(family: str) -> None:
    form = MessageFormat("mistral" if family == "named" else family, FUNCTIONS)
    for text, count in zip(ONE[family], (1, 2), strict=True):
        message = MessageParser(form).feed(text, ends=True)
        assert (message.content, len(message.tool_calls)) == ("", count)
        assert json.loads(message.tool_calls[0].arguments) == json.loads(WEATHER)


def test_thoughts_go_before_calls(
    syntax: Callable[..., CallSyntax], allows: Callable[[str, str], bool]
) -> None:
    call = hermes(WEATHER)
    begun = required_calls(syntax("hermes", "begun"), FUNCTIONS, is_parallel=True)
    possible = required_calls(syntax("hermes", "possible"), FUNCTIONS, is_parallel=True)
    assert allows(begun, f"hm {{ \n</think>\n\n{call}")
    assert not allows(begun, call)
    assert allows(possible, f"<think>hm</think>\n\n{call}")
    assert allows(possible, call)
    assert not allows(possible, f"hm {call}")


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ('start: "a" | "b"', "a"),
        (LLMatcher.grammar_from_regex("[ab]"), "b"),
        (LLMatcher.grammar_from_json_schema({"enum": ["a"]}), '"a"'),
    ],
)
def test_thoughts_go_before_any_form(
    form: str,
    answer: str,
    syntax: Callable[..., CallSyntax],
    allows: Callable[[str, str], bool],
) -> None:
    grammar = behind_thoughts(syntax("", "begun"), form)
    assert allows(grammar, f"hm</think>\n\n{answer}")
    assert not allows(grammar, answer)
    assert not allows(grammar, "hm</think>\n\nc")


def test_texts_between_tags_hold_no_tag_that_ends_them(
    syntax: Callable[..., CallSyntax], allows: Callable[[str, str], bool]
) -> None:
    grammar = required_calls(syntax("qwen3_xml"), FUNCTIONS, is_parallel=True)
    assert allows(grammar, XML.replace("Zürich", "a <b>\n\n</p> c"))
    assert allows(grammar, XML.replace("Zürich", ""))
    assert not allows(grammar, XML.replace("Zürich", "a<parameter=b"))
    optional = '<parameter=unit>\nC\n</parameter>\n<parameter=when>\n{"h": 1}\n</parameter>\n'
    assert allows(grammar, XML.replace("</function>", optional + "</function>"))
    assert not allows(
        grammar, XML.replace("</function>", optional.replace("C", "K") + "</function>")
    )


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"anyOf": []}, "'anyOf' of a whole object"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "'pattern' of a text"),
        ({"properties": {"a": {"type": ["string", "null"]}}}, "cannot be told apart"),
        ({"properties": {"a": {"enum": ["x", 1]}}}, "cannot stand between tags"),
        ({"properties": {"a>": {}}}, "cannot be the name"),
        ({"required": ["a"]}, "no property"),
        ({"properties": {"a": 1}}, "a schema is an object"),
        ({"required": [{}]}, "no property"),
        ({"properties": {"a": {"type": {}, "enum": 1}}}, "cannot be told apart"),
        ({"properties": {"a": {"type": 5}}}, "a type is a string"),
        ({"properties": {"a": {"type": [{}]}}}, "a type is a string"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": 1}, "cannot be told apart"),
    ],
)
def test_schemas_that_cannot_be_followed_between_tags_are_refused(
    schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        required_calls(CallSyntax("qwen3_xml", "none", {}), {"f": schema}, is_parallel=True)


def test_schemas_beyond_what_a_grammar_may_hold_are_not_looked_at() -> None:
    functions = {f"f{n}": {"properties": {"a": {"title": "x" * 10_000}}} for n in range(30)}
    for make in (required_calls, possible_calls):
        with pytest.raises(ValueError, match="characters of schemas are over the limit"):
            make(CallSyntax("hermes", "none", {}), functions, is_parallel=True)
