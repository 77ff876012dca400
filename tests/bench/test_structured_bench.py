"""tests.bench.structured: which schemas are taken, and that a wrong answer is seen."""

from typing import Any

import pytest

from tests.bench.structured.instances import let_through
from tests.bench.structured.schemas import Case, _distinct, _spread, _with_types
from tests.bench.structured.validity import (
    Ask,
    Outcome,
    _prefix_mistake,
    asks_of,
    mistake_of,
    table,
)

CASES = [Case(f"case {number}", {"const": number // 2}) for number in range(20)]


def test_schemas_are_taken_once_and_at_equal_distances() -> None:
    taken = _spread(_distinct(CASES), 3)
    assert [case.name for case in taken] == ["case 0", "case 6", "case 12"]
    assert _spread(CASES, 100) == CASES


def test_types_of_tools_become_those_of_json_schema() -> None:
    tool = {"type": "dict", "properties": {"type": {"type": "float", "default": {"type": "dict"}}}}
    assert _with_types(tool)["type"] == "object"
    assert _with_types(tool)["properties"]["type"]["type"] == "number"


def test_each_schema_is_asked_of_base_and_an_adapter_greedy_and_drawn() -> None:
    asks = asks_of([CASES[0], Case("a.tool", {}, is_tool=True)], "base", ["one", "two"])
    assert [(ask.model, ask.temperature, ask.as_tool) for ask in asks[:4]] == [
        ("base", 0.0, False),
        ("base", 1.0, False),
        ("one", 0.0, False),
        ("one", 1.0, False),
    ]
    assert [ask.model for ask in asks[4:]] == ["base"] * 4 + ["two"] * 4
    body = asks[5].body(7)
    assert body["tool_choice"]["function"]["name"] == "a_tool"
    assert "response_format" not in body


@pytest.mark.parametrize(
    ("schema", "text", "mistake"),
    [
        ({"multipleOf": 0.01}, "0.07", ""),
        ({"multipleOf": 0.01}, "0.075", "not a multiple"),
        ({"format": "date"}, '"2021-02-29"', "not a 'date'"),
        ({}, '{"a":', "no JSON"),
        ({}, '"\\ud800"', "no JSON"),
        (False, "1", "False schema"),
        ({"patternProperties": {r"^\p{Letter}+$": {"type": "null"}}}, '{"π":1}', "not of type"),
        ({"patternProperties": {r"^\p{Letter}+$": {"type": "null"}}}, '{"7":1}', ""),
        ({"propertyNames": {"pattern": r"^\p{L}"}}, '{"7":1}', "does not match"),
        ({"properties": {"foo": {"type": "null"}}}, '{"\\u0066oo":1}', "not of type"),
    ],
)
def test_a_wrong_answer_is_seen(schema: Any, text: str, mistake: str) -> None:
    found = mistake_of(schema, text)
    assert mistake in found
    assert bool(found) == bool(mistake)


def test_the_beginning_of_an_answer_is_looked_at_too() -> None:
    for sound in ('{"a": [1, "b', '"a b', '"a\\'):
        assert _prefix_mistake(sound) == ""
    assert "no beginning" in _prefix_mistake('"a\n')
    assert "no beginning" in _prefix_mistake('{"a": ]')


def test_the_table_counts_each_kind_and_names_what_is_wrong() -> None:
    ask = Ask(CASES[0], "base", 1.0, 0)
    refused = Outcome(ask, "refused", 'response_format: Unimplemented keys: ["not"]')
    shown = table([Outcome(ask, "valid"), refused, Outcome(ask, "invalid", "so wrong")])
    assert "| suite, as response_format | 1 | 1 | 0 | 1 | 0 |" in shown
    assert '| Unimplemented keys: ["not"] | 1 |' in shown
    assert "invalid: case 0 (base, 1): so wrong" in shown


def test_a_value_that_is_let_through_is_seen() -> None:
    refused = Case("not followed", {"not": {}}, wrong=(1, 2))
    fine = Case("followed", {"type": "string"}, wrong=(1, None))
    slips = Case("says less than the suite means", {"type": "string"}, wrong=("a", 1))
    assert let_through([refused, fine, slips]) == (4, ['says less than the suite means: "a"'])
