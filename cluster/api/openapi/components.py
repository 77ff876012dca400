"""JSON schemas of bodies and answers, under the names that a document refers to them by.

Bodies are pydantic's, answers are msgspec's: each describes its own. What neither can know is put
right here: a field of an answer that has a default is always sent, and a body takes of what is no
field of it only what asks for nothing.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import UNSET
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.api.openapi.values import OTHERS, REFUSED, schema_of
from cluster.api.schemas.requests import HARMLESS, Body, Message

REFERENCE = "#/components/schemas/"
_ANYTHING = "JsonValue"  # pydantic's name for it
_NULL = {"type": "null"}
_RENAMED = {Message: "ChatMessageParam"}  # bodies whose name an answer has


@lru_cache  # the same for all applications of a process, and made in 150 ms
def answer_schemas(types: tuple[Any, ...]) -> tuple[dict[str, Any], dict[Any, dict[str, Any]]]:
    """Return the components of answers, and the schema of each type that refers to them."""
    wanted = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(wanted, ref_template=REFERENCE + "{name}")
    for struct in _structs(wanted):
        _all_sent(components[struct.__name__], struct)
    return components, dict(zip(wanted, schemas, strict=True))


@lru_cache
def body_schemas(
    models: tuple[type[BaseModel], ...], *, is_lenient: bool
) -> tuple[dict[str, Any], dict[type[BaseModel], dict[str, Any]]]:
    """Return the components of bodies, and the schema of each that refers to them."""
    wanted = list(dict.fromkeys(models))
    by_key, whole = models_json_schema(
        [(model, "validation") for model in wanted], ref_template=REFERENCE + "{model}"
    )
    components = whole.get("$defs", {})
    for model in _models(wanted):
        _look_into(components[model.__name__], model)
    for model in wanted:
        if issubclass(model, Body) and not is_lenient:
            _close(components[model.__name__], model)
    names = {model.__name__: name for model, name in _RENAMED.items()}
    renamed = {names.get(name, name): _renamed(one, names) for name, one in components.items()}
    return renamed, {model: _renamed(by_key[model, "validation"], names) for model in wanted}


def _structs(types: Iterable[Any]) -> list[type[msgspec.Struct]]:
    """Return all structs within some types, once each."""
    found: dict[type[msgspec.Struct], None] = {}
    left = list(types)
    while left:
        one = left.pop()
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            if one not in found:
                found[one] = None
                left += get_type_hints(one).values()
        else:
            left += get_args(one)
    return list(found)


def _models(types: Iterable[Any]) -> list[type[BaseModel]]:
    """Return all models within some types, once each."""
    found: dict[type[BaseModel], None] = {}
    left = list(types)
    while left:
        one = left.pop()
        if isinstance(one, type) and issubclass(one, BaseModel):
            if one not in found:
                found[one] = None
                left += [field.annotation for field in one.model_fields.values()]
        else:
            left += get_args(one)
    return list(found)


def _all_sent(schema: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    for one in msgspec.structs.fields(struct):
        schema["properties"][one.encode_name].pop("default", None)
    sent = [one.encode_name for one in msgspec.structs.fields(struct) if one.default is not UNSET]
    config = struct.__struct_config__
    if config.tag is not None:
        sent.insert(0, str(config.tag_field))
    schema["required"] = sent


def _look_into(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Say of the fields of a body that may be any JSON what the code takes; name none twice."""
    properties = schema.get("properties", {})
    for name, one in properties.items():
        if one.get("$ref") == REFERENCE + _ANYTHING:
            properties[name] = schema_of(model, name)
        else:
            one.pop("title", None)
    properties.update(REFUSED.get(model, {}))
    if model in OTHERS:
        schema["additionalProperties"] = OTHERS[model]


def _close(schema: dict[str, Any], model: type[Body]) -> None:
    """Say of a body what it takes beside its fields."""
    properties = schema.get("properties", {})
    schema["additionalProperties"] = _NULL
    if "model" not in properties:  # it asks for no answer, so nobody spells it as another server
        return
    for name in sorted(HARMLESS - properties.keys()):
        properties[name] = {"description": "accepted, without effect on the answer"}
    for name, values in sorted(model.neutral_values.items()):
        if name not in properties:
            properties[name] = {
                "description": "not supported; these values ask for nothing",
                "enum": [None, *values],
            }


def _renamed(schema: Any, names: dict[str, str]) -> Any:
    if isinstance(schema, list):
        return [_renamed(one, names) for one in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: _renamed(value, names) for key, value in schema.items()}
    reference = renamed.get("$ref")
    if isinstance(reference, str):
        name = reference.removeprefix(REFERENCE)
        renamed["$ref"] = REFERENCE + names.get(name, name)
    return renamed
