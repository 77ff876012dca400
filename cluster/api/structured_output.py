"""Structured output as OpenAI, vLLM and SGLang spell it, made into one grammar for the ranks.

Owns the spellings and that only one of them is used. Whether the grammar can be followed says
`cluster.router.sandbox.grammars`.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from pydantic import JsonValue

from cluster.api.schemas.requests import GenerationBody
from cluster.errors import InvalidRequest
from cluster.router.bodies.weight import weight
from cluster.router.parser.json_schemas import ESCAPES, followed

MAX_TEXT = 128 * 1024  # characters of a schema, a regex or a grammar
_LARK_BEGINS = re.compile(r"\s*(%llguidance\b|start\s*:)").match
MAX_GBNF = 16 * 1024  # characters of a grammar in GBNF, which is taken apart beside the streams
MAX_CHOICES = 4096
MAX_TAGS = 128
# Without white space between its parts: a model could go on with that for ever, and what is
# certain need not be sampled.
_JSON_OPTIONS: Any = {"whitespace_flexible": False, **ESCAPES}
_OF_ANYTHING: dict[str, JsonValue] = {"type": "object"}


def grammar_of(body: GenerationBody) -> tuple[str, str]:
    """Return the grammar that a body asks for and the parameter that does, "" for none.

    Raises:
        InvalidRequest: if it asks for several, or for something that is none.
    """
    wanted = [
        (param, make, value)
        for param, make, value in _spellings(body)
        if value not in (None, False)
    ]
    if not wanted:
        return "", ""
    if len(wanted) > 1:
        names = " and ".join(param for param, _, _ in wanted)
        raise InvalidRequest(f"{names}: an answer has one form only", wanted[1][0])
    ((param, make, value),) = wanted
    for name, clash in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if clash:
            raise InvalidRequest(f"{name}: with {param}, the answer ends when its form does", name)
    try:
        return make(value, param), param
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise InvalidRequest(f"{param}: {str(error)[:300]}", param) from None


Maker = Callable[[Any, str], str]


def _spellings(body: GenerationBody) -> list[tuple[str, Maker, Any]]:
    """Return (parameter, what makes its grammar, value) of all parameters for it."""
    found: list[tuple[str, Maker, Any]] = [
        ("guided_json", _json, body.guided_json),
        ("guided_regex", _regex, body.guided_regex),
        ("guided_choice", _choice, body.guided_choice),
        ("guided_grammar", _grammar, body.guided_grammar),
        ("json_schema", _json, body.json_schema),
        ("regex", _regex, body.regex),
        ("ebnf", _grammar, body.ebnf),
        ("structural_tag", _structural_tag, body.structural_tag),
    ]
    outputs = body.structured_outputs
    if outputs is not None:
        found += [
            ("structured_outputs.json", _json, outputs.json_),
            ("structured_outputs.regex", _regex, outputs.regex),
            ("structured_outputs.choice", _choice, outputs.choice),
            ("structured_outputs.grammar", _grammar, outputs.grammar),
            ("structured_outputs.json_object", _json_object, outputs.json_object),
            ("structured_outputs.structural_tag", _structural_tag, outputs.structural_tag),
        ]
    if body.response_format is not None:
        found.append(("response_format", _response_format, _plain(body.response_format)))
    found.append(("text.format", _text_format, body.text_format))
    return found


def _plain(value: Any) -> Any:
    dumped = value.model_dump(by_alias=True, exclude_unset=True)
    return None if dumped.get("type") == "text" else dumped


def _response_format(value: dict[str, Any], param: str) -> str:
    match value["type"]:
        case "json_object":
            return _json(_OF_ANYTHING, param)
        case "json_schema":
            wrapped = value.get("json_schema")
            schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
            if schema is None:
                raise ValueError("json_schema.schema is missing")
            return _json(schema, f"{param}.json_schema.schema")
        case "structural_tag":
            return _structural_tag(value, param)
    known = "text, json_object, json_schema and structural_tag"
    raise ValueError(f"the type {str(value['type'])[:60]!r} is not one of {known}")


def _text_format(value: dict[str, Any], param: str) -> str:
    """Return the grammar of a form that /v1/responses has checked."""
    if value["type"] == "json_object":
        return _json(_OF_ANYTHING, param)
    return _json(value["schema"], f"{param}.schema")


def _json_object(_: bool, param: str) -> str:
    return _json(_OF_ANYTHING, param)


def _json(value: JsonValue, param: str) -> str:
    """Return the grammar of a JSON schema, given as such or as text."""
    schema = _loaded(value)
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema is an object")
    _check_parts(schema)
    _check_length(json.dumps(schema))
    text = json.dumps(followed(schema))
    return str(LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS))


def _loaded(value: JsonValue) -> Any:
    if not isinstance(value, str):
        return value
    _check_length(value)
    return json.loads(value)


def _regex(value: str, param: str) -> str:
    """Return the grammar of a regular expression, of the whole answer with or without anchors."""
    _check_length(value)
    inner = value.removeprefix("^")
    if re.search(r"(?<!\\)(\\\\)*\$$", inner):
        inner = inner[:-1]
    return str(LLMatcher.grammar_from_regex(inner))


def _choice(value: list[str], param: str) -> str:
    if not 1 <= len(value) <= MAX_CHOICES:
        raise ValueError(f"1 to {MAX_CHOICES} choices, not {len(value)}")
    if not all(value):
        raise ValueError("a choice must not be empty")
    _check_length("".join(value))
    return "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value)


def _grammar(value: str, param: str) -> str:
    """Return a grammar in Lark's syntax from one in that or in GBNF's."""
    _check_length(value)
    # As llguidance tells them apart, which takes minutes for empty lines.
    if any(_LARK_BEGINS(line) for line in value.splitlines()):
        return value
    if len(value) > MAX_GBNF:
        raise ValueError(f"{len(value)} characters of GBNF are over the limit of {MAX_GBNF}")
    try:
        return gbnf_to_lark(value)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ValueError(str(error)) from None  # llguidance says so of a rule that is missing


def _structural_tag(value: JsonValue, param: str) -> str:
    """Return the grammar of text in which what follows a trigger has a form of its own."""
    loaded = _loaded(value)
    structures = loaded.get("structures") if isinstance(loaded, dict) else None
    triggers = loaded.get("triggers") if isinstance(loaded, dict) else None
    if not (isinstance(structures, list) and isinstance(triggers, list)):
        raise ValueError("a structural tag is an object with `structures` and `triggers`")
    if not 1 <= len(structures) <= MAX_TAGS or len(triggers) > MAX_TAGS:
        raise ValueError(f"1 to {MAX_TAGS} structures, not {len(structures)}")
    _check_parts(loaded)
    _check_length(json.dumps(loaded))
    return str(StructTag.to_grammar([_tag(one, triggers) for one in structures]))


def _tag(structure: Any, triggers: list[Any]) -> StructTag:
    fields = structure if isinstance(structure, dict) else {}
    begin, end, schema = fields.get("begin"), fields.get("end"), fields.get("schema", {})
    if not (isinstance(begin, str) and isinstance(end, str) and isinstance(schema, dict)):
        raise ValueError("a structure has the texts `begin` and `end`, and a `schema`")
    fitting = [one for one in triggers if isinstance(one, str) and one and begin.startswith(one)]
    if not fitting:
        raise ValueError(f"no trigger is the beginning of {begin[:60]!r}")
    grammar = {**followed(schema), "x-guidance": _JSON_OPTIONS}
    return StructTag(trigger=fitting[0], begin=begin, grammar=grammar, end=end)


def _check_parts(value: JsonValue) -> None:
    """Refuse what is surely too long before it is spelled out: each part is two characters."""
    if weight(value, MAX_TEXT // 2) > MAX_TEXT // 2:
        raise ValueError(f"over {MAX_TEXT // 2} parts, its text would be over the limit")


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise ValueError(f"{len(text)} characters are over the limit of {MAX_TEXT}")
