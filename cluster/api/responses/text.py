"""`text` of a Responses call: which form its answer has."""

from typing import Any

from pydantic import JsonValue

from cluster.api.responses.objects import TextFormat, TextSettings
from cluster.errors import InvalidRequest

MAX_NAME_LENGTH = 64  # characters
_KINDS = ("text", "json_object", "json_schema")
_OF_SCHEMA: dict[str, type] = {"name": str, "description": str, "schema": dict, "strict": bool}


def text_settings(value: JsonValue) -> TextSettings:
    """Return what `text` asks for.

    Raises:
        InvalidRequest: naming the key and the reason.
    """
    if value is None:
        return TextSettings()
    if not isinstance(value, dict):
        raise InvalidRequest("text: must be an object", "text")
    if value.get("verbosity") not in (None, "medium"):
        raise _unsupported("text.verbosity", "is not supported but as 'medium'")
    for name, one in sorted(value.items()):
        if name not in ("format", "verbosity") and one is not None:
            raise _unsupported(f"text.{name[:100]}", "is not supported")
    return TextSettings(_format(value.get("format")))


def _format(value: JsonValue) -> TextFormat:
    if value is None:
        return TextFormat()
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in _KINDS:
        raise InvalidRequest(
            f"text.format: must be an object of type {', '.join(_KINDS)}", "text.format"
        )
    said: dict[str, Any] = {name: one for name, one in value.items() if one is not None}
    del said["type"]
    for name, one in sorted(said.items()):
        param = f"text.format.{name[:100]}"
        if kind != "json_schema" or name not in _OF_SCHEMA:
            raise _unsupported(param, f"is not supported with the type {kind}")
        if type(one) is not _OF_SCHEMA[name]:
            raise InvalidRequest(f"{param}: must be of type {_OF_SCHEMA[name].__name__}", param)
    if kind == "json_schema":
        for name in ("name", "schema"):
            if name not in said:
                raise InvalidRequest(f"text.format.{name}: is missing", f"text.format.{name}")
        if not 1 <= len(said["name"]) <= MAX_NAME_LENGTH:
            raise InvalidRequest(
                f"text.format.name: must have 1 to {MAX_NAME_LENGTH} characters", "text.format.name"
            )
    return TextFormat(kind, **said)  # type: ignore[arg-type]


def _unsupported(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {reason}", param, "unsupported_parameter")
