"""cluster.router.parser.patterns: a pattern of ECMA 262 means in Rust what it meant."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.router.parser.json_schemas import followed

BYTES = LLTokenizer("byte")


def matches(pattern: str, text: str) -> bool:
    schema = {"type": "string", "pattern": pattern}
    matcher = LLMatcher(
        BYTES, LLMatcher.grammar_from_json_schema(json.dumps(followed(schema))), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(json.dumps(text, ensure_ascii=False))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "fine", "wrong"),
    [
        ("^.$", "aé🐲\t", ["\n", "\r", "\u2028", "ab", ""]),
        ("^[.]$", ".", "a\n"),
        (r"^\.$", ".", "a"),
        (r"^\s$", " \t\u00a0\u3000", "a\u0085"),
        (r"^\S$", "a.", ["\ufeff", "\u0085", " ", "\u2003"]),
        (r"^[\s]$", " \n", "sa"),
        (r"^[\S]$", "as", [" ", "\ufeff"]),
        (r"^[^\s]$", "a", [" ", "\ufeff", "\u0085"]),
        (r"^[^\S]$", " \n", ["a", "\u0085"]),
        (r"^[\sx]$", " x", "s"),
        ("^[^a&&b]$", "xA", "a&b"),
        ("^[a&&b]$", "a&b", "c"),
        ("^[a~~b]$", "a~b", "c"),
        ("^[[a]$", "[a", "]"),
        (r"^[^[\]]$", "a", "[]"),
        (r"^[a\-z]$", "a-z", "b"),
        ("^[a-c]$", "abc", "-d"),
        ("^[a-]$", "a-", "b"),
        (r"^\<$", "<", "a"),
        (r"^\d\w$", ["1a"], ["١a", "1é"]),
        ("^a|b$", ["ax", "xb"], "x"),
        (r"^\u0041\x42$", ["AB"], "A"),
        ("^(?:a{2,3}|(b)+)$", ["aa", "bb"], "a"),
    ],
)
def test_a_pattern_means_what_it_meant(
    pattern: str, fine: list[str] | str, wrong: list[str] | str
) -> None:
    for text in fine:
        assert matches(pattern, text), text
    for text in wrong:
        assert not matches(pattern, text), text


def test_a_class_within_a_class_is_none() -> None:
    assert matches("^[[a]]$", "a]")
    assert matches("^[[a]]$", "[]")
    assert not matches("^[[a]]$", "a")


@pytest.mark.parametrize(
    "pattern", ["[a-z--b]", "[]", "[^]", "[]a]", r"\e", r"\Q", r"\U0041", "a\\"]
)
def test_what_has_no_meaning_there_or_another_one_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"pattern: "):
        followed({"pattern": pattern})
