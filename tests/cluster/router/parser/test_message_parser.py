"""Answers of each family, taken apart: whole, and in pieces of any size to the same parts."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.router.parser.families import (
    MessageFormat,
    MessageParser,
    reasoning_parser,
    tool_call_parser,
)
from cluster.router.parser.message import MessageDelta
from tests.random_cases import num_cases

FUNCTIONS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "parts": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
Parts = tuple[str, str, list[tuple[str, str]]]  # thoughts, content, calls


def form(family: str, **changes: Any) -> MessageFormat:
    return MessageFormat(tool_calls=family, functions=FUNCTIONS, **changes)


def parts(message_format: MessageFormat, texts: list[str]) -> Parts:
    """Return what an answer says that comes in these pieces."""
    parser = MessageParser(message_format)
    deltas: list[MessageDelta] = [*map(parser.feed, texts), parser.feed("", ends=True)]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        for call in delta.tool_calls:
            if call.name is not None:
                assert call.index == len(names), "a call begins once, in its turn"
                names[call.index] = call.name
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
    assert [*names] == [*arguments]
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        [(names[index], arguments[index]) for index in names],
    )


def whole(message_format: MessageFormat, text: str) -> Parts:
    """Return what an answer says, whatever its pieces: all at once, and each character alone."""
    found = parts(message_format, [text])
    assert parts(message_format, list(text)) == found
    return found


HERMES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call at all", "no call at all", []),
    ("", "", []),
    (" \n a < b <tool  \n", " \n a < b <tool  \n", []),
    ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [("now", "{}")]),
    (
        'So:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🌳", "days": 2}}\n'
        '</tool_call>\n<tool_call>{"arguments":{"a":[1,{"b":null}]},"name":"now"}</tool_call>\n',
        "So:",
        [("get_weather", '{"city": "Zürich 🌳", "days": 2}'), ("now", '{"a":[1,{"b":null}]}')],
    ),
    (
        '<tool_call>{"id": [1, "x"], "name": "now", "parameters": {"t": "</tool_call> \\" }"}}'
        "</tool_call>",
        "",
        [("now", '{"t": "</tool_call> \\" }"}')],
    ),
    ('<tool_call>{"name": "now"}</tool_call>.', ".", [("now", "{}")]),
    ('<tool_call>{"name": "now", "arguments": {"a": 1}}', "", [("now", '{"a": 1}')]),
    ('<tool_call>{"name": "now", "arguments": {"a": "b', "", [("now", '{"a": "b')]),
    ('<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_', "", [("now", '{"a": 1}')]),
    # What has not begun stays as it is.
    ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None, []),
    ('a <tool_call>{"name": "no', None, []),
    ("<tool_call>\n\n</tool_call>", None, []),
    ("<tool_call>{}</tool_call>", None, []),
    ("<tool_call>[1]</tool_call>", None, []),
    ('<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', None, []),
    ('<tool_call>{"arguments": {"a": }, "name": "now"}</tool_call>', None, []),
    ('<<tool_call>{"name" "now"}', None, []),
    (
        '<tool_call>nonsense<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "<tool_call>nonsense",
        [("now", "{}")],
    ),
    # What has begun goes on to its end.
    (
        '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call> so',
        "so",
        [("now", '{"a": oops}}')],
    ),
    (
        '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        [("now", '{"a": "x\ny"}')],
    ),
    ('<tool_call>{"name": "now", "arguments": {}}}</tool_call>', "}</tool_call>", [("now", "{}")]),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_calls_between_tags(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    expected = ("", text if content is None else content, calls)
    assert whole(form("hermes"), text) == expected


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "now", "parameters": {}}', "", [("now", "{}")]),
        (
            '\n <|python_tag|>{"type": "function", "name": "now", "parameters": {"a": 1}}',
            "",
            [("now", '{"a": 1}')],
        ),
        (
            '{"name": "now", "parameters": {}}; '
            '{"name": "get_weather", "arguments": {"city": "x"}}',
            "",
            [("now", "{}"), ("get_weather", '{"city": "x"}')],
        ),
        ('{"name": "Ann", "parameters": {}}', None, []),
        ('{"answer": 42}', None, []),
        ('{"name": "now"', None, []),
        ('I say {"name": "now", "parameters": {}}', None, []),
        ("  plain <|python tag", None, []),
        ('{"name": "now", "parameters": {}} and more', "and more", [("now", "{}")]),
        ('{"name": "now", "parameters": {"a": b}} and', "", [("now", '{"a": b}} and')]),
    ],
)
def test_calls_that_are_the_whole_answer(
    text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = ("", text if content is None else content, calls)
    assert whole(form("llama3_json"), text) == expected


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}}]', "", [("now", "{}")]),
        (
            'ok [TOOL_CALLS][{"name": "now", "arguments": {}}, {"arguments": {"city": "]"}, '
            '"name": "get_weather"}]',
            "ok",
            [("now", "{}"), ("get_weather", '{"city": "]"}')],
        ),
        (
            '[TOOL_CALLS]now[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{"city": "x"}',
            "",
            [("now", '{"a": 1}'), ("get_weather", '{"city": "x"}')],
        ),
        ('[TOOL_CALLS]now{"a": 1}', "", [("now", '{"a": 1}')]),
        ('[TOOL_CALLS]now{"a": b}[TOOL_CALLS]now{}', "", [("now", '{"a": b}'), ("now", "{}")]),
        ("[TOOL_CALLS]nobody{}", None, []),
        ("[TOOL_CALLS]", None, []),
        ("a [TOOL] b [1, 2]", None, []),
    ],
)
def test_calls_behind_a_tag(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    expected = ("", text if content is None else content, calls)
    assert whole(form("mistral"), text) == expected


def xml(*parameters: str, name: str = "get_weather") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (xml(name="now"), "", [("now", {})]),
        (
            "Well.\n\n" + xml(parameter("city", 'Paris "\n\n<b>\n'), parameter("days", "3")),
            "Well.",
            [("get_weather", {"city": 'Paris "\n\n<b>\n', "days": 3})],
        ),
        (
            xml(
                parameter("exact", "True"),
                parameter("parts", '["a", 1]'),
                parameter("note", "null"),
            ),
            "",
            [("get_weather", {"exact": True, "parts": ["a", 1], "note": None})],
        ),
        (
            xml(parameter("exact", "1"), parameter("days", "two"), parameter("other", "7")),
            "",
            [("get_weather", {"exact": "1", "days": "two", "other": "7"})],
        ),
        (
            xml("<parameter=city>a<parameter=note>\nb"),
            "",
            [("get_weather", {"city": "a", "note": "b"})],
        ),
        (
            xml(parameter("days", "9" * 5000)) + "\n" + xml(name="now"),
            "",
            [("get_weather", "9" * 5000), ("now", {})],
        ),
        (xml(name="nobody"), None, []),
        ("<tool_call>now</tool_call>", None, []),
        ("<tool_call><function=now", None, []),
        ("<tool_call><function=now>so</function>", "so</function>", [("now", {})]),
    ],
)
def test_calls_with_tags_for_each_argument(
    text: str, content: str | None, calls: list[tuple[str, Any]]
) -> None:
    reasoning, said, found = whole(form("qwen3_xml"), text)
    assert (reasoning, said) == ("", text if content is None else content)
    assert [name for name, _ in found] == [name for name, _ in calls]
    for (_, arguments), (_, expected) in zip(found, calls, strict=True):
        if isinstance(expected, str):
            assert arguments == f'{{"days": {expected}}}'
        else:
            assert json.loads(arguments) == expected


def test_arguments_between_tags_that_are_cut_short_stay_as_far_as_they_came() -> None:
    text = xml(parameter("city", "Paris"), parameter("note", "a\nb"))
    cut = text[: text.index("b\n")]
    (call,) = whole(form("qwen3_xml"), cut)[2]
    assert call == ("get_weather", '{"city": "Paris", "note": "a')


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."),
        ("\n<think>a  b\n\nc", False, "a  b\n\nc", ""),
        ("hm </thin k> \n</think>Yes </think>.", True, "hm </thin k>", "Yes </think>."),
        ("<think>hm</think>Yes", True, "hm", "Yes"),
        ("\n hm", True, "hm", ""),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("  Yes", False, "", "  Yes"),
        ("<thin", False, "", "<thin"),
        ("<think></think>Yes", False, "", "Yes"),
    ],
)
def test_thoughts_come_first(text: str, is_open: bool, reasoning: str, content: str) -> None:
    thinking = MessageFormat(reasoning="qwen3", begins_in_thought=is_open)
    assert whole(thinking, text) == (reasoning, content, [])


def test_calls_come_behind_thoughts_and_none_is_in_them() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = f"<think>{call}</think>{call}"
    assert whole(form("hermes", reasoning="qwen3"), text) == (call, "", [("now", "{}")])


def test_thoughts_that_nobody_wants_are_left_out() -> None:
    hiding = form("hermes", reasoning="qwen3", shows_reasoning=False)
    assert whole(hiding, "<think>hm</think>Yes") == ("", "Yes", [])


def test_a_second_call_is_left_out_where_one_is_allowed() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert whole(form("hermes", is_parallel=False), call * 3 + "x") == ("", "x", [("now", "{}")])


@pytest.mark.parametrize("schema", [1, {"anyOf": 1}, {"type": [{}]}, {"type": {}}, {"$ref": 1}])
def test_a_schema_that_is_none_breaks_no_answer(schema: Any) -> None:
    functions = {"f": {"properties": {"a": schema}}, "g": {"properties": 1}}
    strange = MessageFormat("qwen3_xml", functions)
    for name in functions:
        ((_, arguments),) = whole(strange, xml(parameter("a", "[1]"), name=name))[2]
        assert list(json.loads(arguments)) == ["a"]


FAMILIES = ("", "hermes", "llama3_json", "mistral", "qwen3_xml")
PIECES = [
    "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {}}', '{"name": "now", ',
    '"arguments": {"a": [1, true, "x"]}', "}", "{", "[TOOL_CALLS]", "[ARGS]", "now", "[", "]",
    "<|python_tag|>", "<function=now>", "</function>", "<parameter=days>", "</parameter>", "\n",
    " ", "<think>", "</think>", "<", ">", '"', "\\", "é🌳\u2028", "; ", "1e5", "null", ",",
]  # fmt: skip


@settings(max_examples=num_cases(600), deadline=None)
@given(st.data())
def test_no_cut_changes_what_an_answer_says(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14)))
    chosen = MessageFormat(
        tool_calls=data.draw(st.sampled_from(FAMILIES)),
        functions=FUNCTIONS,
        is_parallel=data.draw(st.booleans()),
        reasoning=data.draw(st.sampled_from(["", "qwen3"])),
        begins_in_thought=data.draw(st.booleans()),
    )
    expected = whole(chosen, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts(chosen, pieces) == expected


@settings(max_examples=num_cases(300), deadline=None)
@given(st.lists(st.sampled_from(PIECES[3:]) | st.text(max_size=5), max_size=12))
def test_text_without_an_opening_stays_as_it_is(texts: list[str]) -> None:
    text = "".join(texts).replace("<tool_call>", "")
    assert whole(form("hermes"), text) == ("", text, [])


@pytest.mark.parametrize(
    ("template", "tool_calls", "reasoning"),
    [
        ("{{ messages }}", "", ""),
        ("{% if tools %}<tool_call>{% endif %}", "hermes", ""),
        ("<tool_call>\n<function=example>\n<parameter=a> {{ '</think>' }}", "qwen3_xml", "qwen3"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", ""),
        ("<|python_tag|>", "llama3_json", ""),
        ('{{ tools }} {"name": function name, "parameters": dictionary}', "llama3_json", ""),
    ],
)
def test_a_template_says_how_its_model_calls(
    template: str, tool_calls: str, reasoning: str
) -> None:
    assert tool_call_parser("auto", template) == tool_calls
    assert reasoning_parser("auto", template) == reasoning
