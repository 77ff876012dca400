"""Blocks become turns: consecutive ones of a role are one, texts are joined by newlines."""

from typing import Any

import pytest

from cluster.api.messages.blocks import REASONS, Turn, system_turns, turns_of
from cluster.errors import InvalidRequest


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def said(turns: list[Turn]) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in turns]


CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c", "content": content, **more}


def test_texts_and_blocks_of_text_are_turns() -> None:
    marked = text("b", cache_control={"type": "ephemeral"}, citations=None)
    turns = turns_of([("user", "a"), ("assistant", [marked, text("c")]), ("user", [])])
    assert said(turns) == [("user", "a"), ("assistant", "b\nc"), ("user", "")]


def test_consecutive_messages_of_one_role_are_one_turn() -> None:
    turns = turns_of([("user", "a"), ("user", [text("b")]), ("system", "s"), ("user", "c")])
    assert said(turns) == [("user", "a\nb"), ("system", "s"), ("user", "c")]


@pytest.mark.parametrize("nothing", [None, "", []])
def test_a_system_prompt_that_says_nothing_is_no_turn(nothing: Any) -> None:
    assert system_turns(nothing) == []


def test_a_system_prompt_is_a_text_or_blocks() -> None:
    assert said(system_turns("s")) == [("system", "s")]
    assert said(system_turns([text("s"), text("t")])) == [("system", "s\nt")]


@pytest.mark.parametrize("kind", sorted(REASONS))
def test_a_block_that_is_not_read_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=REASONS[kind]) as caught:
        turns_of([("user", "a"), ("assistant", [text("b"), {"type": kind}])])
    assert caught.value.param == "messages.1.content.1.type"
    assert caught.value.code == "unsupported_parameter"


def test_calls_and_thoughts_are_of_the_turn_and_results_are_turns_in_front_of_what_is_said() -> (
    None
):
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    turns = turns_of(
        [
            ("assistant", [thought, text("I call"), CALL, CALL | {"id": "d"}]),
            ("user", [result("one"), result([text("two"), text("three")]), text("so?")]),
        ]
    )
    assert said(turns) == [
        ("assistant", "I call"),
        ("tool", "one"),
        ("tool", "two\nthree"),
        ("user", "so?"),
    ]
    assert turns[0].thoughts == ["hm"]
    assert [call["id"] for call in turns[0].calls] == ["c", "d"]
    assert turns[0].calls[0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert [turn.call_id for turn in turns] == [None, "c", "c", None]


def test_a_result_alone_leaves_no_empty_turn_behind() -> None:
    turns = turns_of([("assistant", [CALL]), ("user", [result(None, is_error=True)])])
    assert said(turns) == [("assistant", ""), ("tool", "")]


@pytest.mark.parametrize(
    ("role", "block", "reason"),
    [
        ("user", CALL, "only messages of role 'assistant' have one"),
        ("assistant", result("a"), "only messages of role 'user' have one"),
        ("user", {"type": "thinking", "thinking": "a"}, "only messages of role 'assistant'"),
        ("assistant", CALL | {"input": "a"}, "input: must be an object"),
        ("assistant", CALL | {"id": None}, "id: must be a string"),
        ("user", result([{"type": "image"}]), "only text is read"),
        ("user", result([result("a")]), "only text is read here"),
        ("user", result(7), "must be a string or a list of blocks"),
    ],
)
def test_a_block_in_the_wrong_place_or_form_is_refused(
    role: Any, block: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        turns_of([(role, [block])])
