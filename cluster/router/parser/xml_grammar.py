"""The grammar of a call whose arguments stand between tags of their own: see `xml_calls`.

A text between tags cannot be held to a pattern or a length, because what ends it is found in it as
it comes: schemas that want that are refused, as are those of objects that say more than what
properties there are.
"""

import json
from typing import Any

from cluster.router.parser.json_schemas import ESCAPES, followed

_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_SAYS_NOTHING = {"title", "description", "default", "examples", "$schema", "$id", "$comment"}
_OF_TEXTS = {"minLength", "maxLength", "pattern", "format", "contentEncoding"}
# The tags by which a parser would end it, but for its own.
_TEXT = r"/(?s:.*)\n<\/parameter>\n/ & ~/(?s:.*)(<parameter=|<\/function>)(?s:.*)/"
_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    **ESCAPES,
}


def xml_call(name: str, schema: dict[str, Any]) -> list[str]:
    """Return the parts of a rule for a call of one function.

    Raises:
        ValueError: if the schema cannot be followed so.
    """
    beyond = sorted(set(schema) - _OF_OBJECTS - _SAYS_NOTHING)
    if beyond:
        raise ValueError(f"{name}: {beyond[0]!r} of a whole object cannot be followed between tags")
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not (isinstance(properties, dict) and isinstance(required, list)):
        raise ValueError(f"{name}: properties must be an object, and required a list")
    unknown = [one for one in required if not isinstance(one, str) or one not in properties]
    if unknown:
        raise ValueError(f"{name}: {unknown[0]!r} is required, but no property")
    definitions: dict[str, Any] = {
        key: schema[key] for key in ("$defs", "definitions") if key in schema
    }
    parts = [_quoted(f"\n<function={name}>\n")]
    for key, wanted in properties.items():
        if not key or ">" in key or "\n" in key:
            raise ValueError(f"{name}: {key[:60]!r} cannot be the name of a parameter")
        value = _value(f"{name}.{key}", wanted, definitions)
        rule = f"{_quoted(f'<parameter={key}>' + chr(10))} {value}"
        parts.append(rule if key in required else f"({rule})?")
    return [*parts, _quoted("</function>\n")]


def _value(where: str, schema: Any, definitions: dict[str, Any]) -> str:
    """Return the rule of a value and the tag behind it."""
    end = _quoted("\n</parameter>\n")
    if schema is True or schema == {}:
        return "text"
    if not isinstance(schema, dict):
        raise ValueError(f"{where}: a schema is an object")
    texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(texts, list) and any(isinstance(one, str) for one in texts):
        if not all(isinstance(one, str) and one and one.strip("\n") == one for one in texts):
            raise ValueError(f"{where}: some of {str(texts)[:60]} cannot stand between tags")
        return f"({' | '.join(map(_quoted, texts))}) {end}"
    declared = _referred(schema, definitions).get("type")
    named = declared if isinstance(declared, list) else [declared] if declared else []
    if not all(isinstance(one, str) for one in named):
        raise ValueError(f"{where}: a type is a string")
    types = set(named)
    if types == {"string"} or not (types or set(schema) - _SAYS_NOTHING):
        beyond = sorted(set(schema) & _OF_TEXTS)
        if beyond:
            raise ValueError(f"{where}: {beyond[0]!r} of a text cannot be followed between tags")
        return "text"
    is_plain = "$ref" not in schema or types <= {"object", "array"}
    if "string" in types or not types or not is_plain:
        raise ValueError(f"{where}: a text or something else cannot be told apart between tags")
    whole = {**followed({**schema, **definitions}), "x-guidance": _STYLE}
    return f"%json {json.dumps(whole)} {end}"


def _referred(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return what a schema refers to, itself if it refers to none of the definitions."""
    match str(schema.get("$ref", "")).split("/"):
        case ["#", where, name]:
            found = definitions.get(where)
            target = found.get(name) if isinstance(found, dict) else None
            return target if isinstance(target, dict) else {}
    return schema


def text_rules() -> list[str]:
    """Return the rules that the values of all calls use."""
    return ["text[lazy]: VALUE", f"VALUE: {_TEXT}"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
