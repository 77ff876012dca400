"""What fields of bodies hold that pydantic takes as any JSON, because the code looks into them.

By the name of the field, and before that by model and field. They say what is taken at most: which
of it goes together, and what this server refuses of it, is in docs/api.md.
"""

from typing import Any

from pydantic import BaseModel

from cluster.api.messages.body import MessageMetadata, MessageParam, OutputConfig, PromptBody
from cluster.api.request_builder import MAX_STOP_LENGTH, MAX_STOPS
from cluster.api.responses.body import FOREIGN, ResponseBody
from cluster.api.schemas.requests import StreamOptions
from cluster.api.tools.tool_use import MAX_TOOLS

Schema = dict[str, Any]
_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}


def _object(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*required]}


def _list_of(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, **bounds}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


def _type(kind: str, required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return _object(("type", *required), type={"const": kind}, **properties)


_TOKENS = _list_of({"type": "integer", "minimum": 0}, minItems=1)
_SOME_TEXT: Schema = {"type": "string", "minLength": 1}
_PROMPTS = _either(
    _SOME_TEXT, _TOKENS, _list_of(_SOME_TEXT, minItems=1), _list_of(_TOKENS, minItems=1)
)
_FUNCTION = _object(
    ("name",),
    name={"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"},
    description=_either(_TEXT, _NULL),
    parameters=_either(_OBJECT, _NULL),
    strict=_either({"type": "boolean"}, _NULL),
)
_TOOLS = _either(
    _NULL, _list_of(_type("function", ("function",), function=_FUNCTION), maxItems=MAX_TOOLS)
)
_NAMED = _type("function", ("function",), function=_object(("name",), name=_TEXT))
_ALLOWED = _object(
    ("mode", "tools"), mode={"enum": ["auto", "required"]}, tools=_list_of(_OBJECT, minItems=1)
)
_TOOL_CHOICE = _either(
    _NULL,
    {"enum": ["none", "auto", "required"]},
    _NAMED,
    _type("allowed_tools", ("allowed_tools",), allowed_tools=_ALLOWED),
)
_CALL = _object(
    ("function",),
    id=_either(_TEXT, _NULL),
    type={"const": "function"},
    function=_object(("name",), name=_TEXT, arguments=_either(_TEXT, _OBJECT, _NULL)),
)
_TEXT_PART = _either(
    _type("text", ("text",), text=_TEXT), _type("refusal", ("refusal",), refusal=_TEXT)
)
# Anthropic's
_TEXTS = _either(_TEXT, _list_of(_type("text", ("text",), text=_TEXT)))
_BLOCK = _either(
    _type("text", ("text",), text=_TEXT),
    _type("thinking", ("thinking",), thinking=_TEXT),
    _type("tool_use", ("id", "name", "input"), id=_TEXT, name=_TEXT, input=_OBJECT),
    _type("tool_result", ("tool_use_id",), tool_use_id=_TEXT, content=_either(_TEXTS, _NULL)),
)
_CUSTOM_TOOL = _object(
    ("name", "input_schema"),
    type={"enum": ["custom", None]},
    name=_FUNCTION["properties"]["name"],
    description=_either(_TEXT, _NULL),
    input_schema=_OBJECT,
    strict=_either({"type": "boolean"}, _NULL),
)
_FORM = _either(_NULL, _type("json_schema", ("schema",), schema=_OBJECT))
# OpenAI's Responses API
_PART = _either(
    *(_type(kind, ("text",), text=_TEXT) for kind in ("input_text", "output_text", "text")),
    _type("refusal", ("refusal",), refusal=_TEXT),
)
_ITEM = _either(
    _object(
        ("role", "content"),
        type={"const": "message"},
        role={"enum": ["user", "assistant", "system", "developer"]},
        content=_either(_TEXT, _list_of(_PART)),
    ),
    _type(
        "function_call",
        ("call_id", "name", "arguments"),
        call_id=_TEXT,
        name=_TEXT,
        arguments=_TEXT,
    ),
    _type(
        "function_call_output",
        ("call_id", "output"),
        call_id=_TEXT,
        output=_either(_TEXT, _list_of(_PART)),
    ),
    _type("reasoning"),
)

_BY_FIELD: dict[str, Schema] = {
    "content": _either(_NULL, _TEXT, _list_of(_TEXT_PART)),
    "guided_json": _either(_NULL, _OBJECT, {"type": "boolean"}, _TEXT),
    "input": _PROMPTS,  # of embeddings
    "json": _either(_NULL, _OBJECT, {"type": "boolean"}, _TEXT),
    "json_schema": _either(_NULL, _object(name=_TEXT, schema=_either(_OBJECT, _NULL))),
    "prompt": _PROMPTS,
    # Of scores, by any of vLLM's names.
    **dict.fromkeys(
        ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"),
        _either(_NULL, _SOME_TEXT, _list_of(_SOME_TEXT, minItems=1)),
    ),
    "stop": _either(
        _NULL,
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        _list_of(
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}, maxItems=MAX_STOPS
        ),
    ),
    "tool_calls": _either(_NULL, _list_of(_CALL, maxItems=512)),
    "tool_choice": _TOOL_CHOICE,
    "tools": _TOOLS,
}
_BY_MODEL: dict[type[BaseModel], dict[str, Schema]] = {
    OutputConfig: {"format": _FORM},
    MessageParam: {"content": _either(_TEXT, _list_of(_BLOCK))},
    PromptBody: {
        "cache_control": {},
        "output_format": _FORM,
        "system": _either(_NULL, _TEXTS),
        "thinking": _either(
            _NULL,
            _type("adaptive"),
            _type("disabled"),
            _type("enabled", ("budget_tokens",), budget_tokens={"type": "integer", "minimum": 1}),
        ),
        "tool_choice": _either(
            _NULL,
            _object(("type",), type={"enum": ["auto", "any", "none"]}),
            _type("tool", ("name",), name=_TEXT),
        ),
        "tools": _either(_NULL, _list_of(_CUSTOM_TOOL, maxItems=MAX_TOOLS)),
    },
    ResponseBody: {
        "input": _either(_TEXT, _list_of(_ITEM, minItems=1)),
        "reasoning": _either(_NULL, _object(effort=_either(_TEXT, _NULL), summary={})),
        "text": _either(_NULL, _OBJECT),
        "tool_choice": _either(
            _NULL, {"enum": ["none", "auto", "required"]}, _object(("type",), type=_TEXT)
        ),
        "tools": _either(_NULL, _list_of(_type("function", ("name",), name=_TEXT))),
    },
}


# What objects within bodies take beside their fields, and fields that are inherited and refused.
OTHERS: dict[type[BaseModel], Schema] = {
    MessageMetadata: _NULL,
    OutputConfig: _NULL,
    StreamOptions: {"enum": [None, False]},
}
REFUSED: dict[type[BaseModel], dict[str, Schema]] = {
    ResponseBody: dict.fromkeys(FOREIGN, _NULL) | {"n": {"enum": [None, 1]}},
}


def schema_of(model: type[BaseModel], name: str) -> Schema:
    """Return what a field of any JSON holds; of one that nobody has described, anything."""
    for one in model.__mro__:
        if name in _BY_MODEL.get(one, {}):
            return _BY_MODEL[one][name]
    return _BY_FIELD.get(name, {})
