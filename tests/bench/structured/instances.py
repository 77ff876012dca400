"""The suite's own invalid values: whether a grammar of ours lets one through, in any spelling."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from cluster.router.parser.json_schemas import ESCAPES, followed
from tests.bench.structured.schemas import Case

_BYTES = LLTokenizer("byte")
_OPTIONS: Any = {"whitespace_flexible": False, **ESCAPES}


def let_through(cases: Sequence[Case]) -> tuple[int, list[str]]:
    """Return how many invalid values were tried, and those that a grammar lets through."""
    num_tried = 0
    found: list[str] = []
    for case in cases:
        matcher = _matcher(case.schema)
        if matcher is None:
            continue  # refused
        for value in case.wrong:
            num_tried += 1
            if any(_accepts(matcher.deep_copy(), text) for text in _spellings(value)):
                found.append(f"{case.name}: {json.dumps(value)[:100]}")
    return num_tried, found


def _matcher(schema: Any) -> LLMatcher | None:
    try:
        text = json.dumps(followed(schema))
        grammar = LLMatcher.grammar_from_json_schema(text, defaults=_OPTIONS)
    except ValueError:
        return None
    matcher = LLMatcher(_BYTES, grammar, log_level=0)
    return None if matcher.is_error() else matcher


def _spellings(value: Any) -> Iterator[str]:
    for is_ascii in (False, True):
        yield json.dumps(value, ensure_ascii=is_ascii, separators=(",", ":"))


def _accepts(matcher: LLMatcher, text: str) -> bool:
    tokens = _BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
