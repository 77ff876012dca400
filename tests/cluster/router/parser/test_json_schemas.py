"""cluster.router.parser.json_schemas: what a schema forbids, no answer says; or it is refused."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.router.parser.json_schemas import ESCAPES, MAX_PARTS, MAX_PATTERN_PROPERTIES, followed

BYTES = LLTokenizer("byte")
BIG = 2**53


def allows(schema: Any, text: str) -> bool:
    """Tell whether a text is a whole answer of a schema."""
    options: Any = {"whitespace_flexible": False, **ESCAPES}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(followed(schema)), defaults=options)
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    ("schema", "fine", "wrong"),
    [
        # A key that is spelled in another way is the same key.
        ({"properties": {"foo": {"type": "integer"}}}, '{"a\\n":"x"}', '{"\\u0066oo":"x"}'),
        ({"patternProperties": {"^🐲$": {"type": "integer"}}}, "{}", '{"\\ud83d\\udc32":"x"}'),
        ({"format": "date"}, text("2024-02-29"), text("2021-02-29")),
        ({"format": "date"}, text("2000-02-29"), text("1900-02-29")),
        ({"format": "date"}, text("0004-02-28"), text("0000-01-01")),
        ({"format": "date"}, text("2021-12-31"), text("2021-02-30")),
        ({"format": "date", "pattern": "^20"}, text("2021-02-09"), text("1921-02-09")),
        ({"format": "date", "pattern": "^20"}, text("2024-02-29"), text("2021-02-29")),
        ({"format": "date", "type": ["string", "null"]}, "null", text("2021-02-29")),
        ({"format": "time"}, text("23:59:59Z"), text("22:59:60Z")),
        ({"format": "date-time"}, text("2024-02-29T23:59:59Z"), text("2023-02-29T23:59:59Z")),
        (
            {"format": "date-time"},
            text("2023-11-19t23:59:59.5+01:00"),
            text("1998-12-31T23:58:60Z"),
        ),
        ({"$ref": "#/x/y", "x": {"y": {"format": "date"}}}, text("2021-02-28"), text("2021-02-29")),
        ({"type": "integer", "minimum": BIG + 1}, str(BIG + 2), str(BIG)),
        ({"type": "integer", "maximum": BIG + 1}, str(BIG), str(BIG + 2)),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**62), str(2**63)),
        ({"type": "integer", "minimum": -(2**63), "maximum": 5}, "-7", "6"),
        ({"type": "integer", "exclusiveMaximum": 10**30}, "5", str(10**30)),
        ({"const": BIG + 2}, str(BIG + 2), str(BIG + 3)),
        ({"pattern": "^[a&&b]$"}, text("&"), text("c")),
        ({"uniqueItems": False, "type": "array"}, "[1,1]", "{}"),
        ({"minProperties": 2, "required": ["a"]}, '{"a":1,"b":1}', '{"a":1}'),
        (True, "[]", "["),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_a_schema_is_followed_to_the_letter(schema: Any, fine: str, wrong: str) -> None:
    assert allows(schema, fine)
    assert not allows(schema, wrong)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "x-guidance": {"lenient": True}}, "x-guidance"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft-03"),
        ({"properties": {"a": {"$schema": "urn:mine"}}}, "urn:mine"),
        ({"minProperties": 2}, "minProperties"),
        ({"items": {"minProperties": 3, "required": ["a"]}}, "minProperties"),
        ({"const": BIG + 1}, "cannot be followed"),
        ({"const": -(2**63)}, "cannot be followed"),
        ({"enum": [{"a": [10**400]}]}, "too large a number"),
        ({"minimum": 10**400}, "too large a number"),
        ({"const": float("inf")}, "no number"),
        ({"enum": ["a", "b\x01"]}, "cannot be said"),
        ({"const": {"\x7f": 1}}, "cannot be said"),
        ({"anyOf": [{"const": []}] * MAX_PARTS}, "10000 objects and lists"),
        ({"pattern": "[a-z--b]"}, "cannot be followed"),
        ({"patternProperties": {"[]a]": True}}, "empty class"),
        (
            {"patternProperties": {f"^{n}$": True for n in range(MAX_PATTERN_PROPERTIES + 1)}},
            "65, over 64",
        ),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_what_cannot_be_followed_to_the_letter_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        followed(schema)


def test_names_and_values_are_not_taken_for_keywords() -> None:
    schema = {
        "properties": {"pattern": {"type": "string"}, "format": {"const": "date"}, "$schema": True},
        "default": {"pattern": "[a--b]", "uniqueItems": False},
        "examples": [{"minProperties": 7}],
    }
    assert followed(schema) == schema


def test_a_schema_that_is_followed_stays_as_it_is() -> None:
    given = {"format": "date", "items": [{"uniqueItems": False}]}
    before = json.dumps(given)
    assert followed(given) != given
    assert json.dumps(given) == before


def test_a_schema_without_an_end_of_its_nesting_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        followed(schema)
