"""The OpenAPI document of an application, from what its routes declare."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from cluster.api.error_handlers import ErrorReply, error_body
from cluster.api.openapi.components import answer_schemas, body_schemas
from cluster.api.openapi.operation import BYTES, EVENTS, JSON, KEY, Operation, Parameter
from cluster.errors import (
    Forbidden,
    Internal,
    Overloaded,
    RequestTimeout,
    TopworkError,
    Unauthorized,
    Unavailable,
)

OPENAPI = "3.1.0"
_MEANINGS = {
    400: "A parameter, a body or an adapter that cannot be served, with the reason.",
    401: "No API key, an unknown one, or one whose time is over.",
    403: "A caller who may not do this.",
    404: "An unknown model, adapter, response or stream.",
    408: "The body has not come in time.",
    409: "The state of an adapter or a stream forbids the call.",
    429: "A limit on requests is reached.",
    500: "A fault on the server's side.",
    503: "No rank is up, the adapter pool is away, or the cluster is being drained.",
    504: "Longer than the server's request timeout.",
}
_TAGS = {
    "inference": "Text and vectors, in the shapes of OpenAI and Anthropic.",
    "tokenizer": "What calls are made of, without computing anything.",
    "models": "What may be asked.",
    "adapters": "Loading, unloading and versions of LoRA adapters.",
    "operations": "Health, metrics and the running of the server.",
}


def openapi_document(
    app: FastAPI,
    routers: Iterable[APIRouter],
    *,
    has_keys: bool,
    may_forbid: bool,
    refuses_pages: bool,
    is_lenient: bool,
) -> dict[str, Any]:
    """Return what /openapi.json says of the routes that declare something.

    Args:
        routers: whose routes the application has.
        has_keys: whether callers need API keys.
        may_forbid: whether there may be callers who lack a right, with keys or without.
        refuses_pages: whether calls of strangers' web pages are refused.
        is_lenient: whether bodies may hold unknown parameters.
    """
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    keys = _Keys(has_keys, may_forbid, refuses_pages)
    return _Document(app.title, app.version, routes, keys, is_lenient).whole()


def _operation_of(route: APIRoute) -> Operation:
    operation = (route.openapi_extra or {})[KEY]
    assert isinstance(operation, Operation), f"{route.path} declares something else"
    return operation


@dataclass(frozen=True, slots=True)
class _Keys:
    are_on: bool
    may_forbid: bool
    refuses_pages: bool


class _Document:
    def __init__(
        self, title: str, version: str, routes: list[APIRoute], keys: _Keys, is_lenient: bool
    ) -> None:
        self._info = {"title": title, "version": version}
        self._keys = keys
        self._operations = [(route, _operation_of(route)) for route in routes]
        operations = [operation for _, operation in self._operations]
        self._answers, self._answer_schemas = answer_schemas(tuple(_answer_types(operations)))
        models = [operation.body for operation in operations if operation.body is not None]
        self._bodies, self._body_schemas = body_schemas(tuple(models), is_lenient=is_lenient)
        self._errors: dict[str, Any] = {}
        self._ids: set[str] = set()
        clashing = self._answers.keys() & self._bodies.keys()
        assert not clashing, f"two schemas of one name: {clashing}"

    def whole(self) -> dict[str, Any]:
        paths: dict[str, Any] = {}
        for route, operation in self._operations:
            for method in sorted(route.methods or ()):
                described = self._operation(route, operation, method.lower())
                paths.setdefault(route.path_format, {})[method.lower()] = described
        components: dict[str, Any] = {
            "schemas": self._answers | self._bodies,
            "responses": self._errors,
        }
        if self._keys.are_on:
            components["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            }
        return {
            "openapi": OPENAPI,
            "info": self._info,
            "tags": [{"name": name, "description": what} for name, what in _TAGS.items()],
            "paths": paths,
            "components": components,
        }

    def _operation(self, route: APIRoute, operation: Operation, method: str) -> dict[str, Any]:
        assert operation.tag in _TAGS, f"{route.path}: the tag {operation.tag} is not known"
        own_id = operation.ids.get(method, route.name)
        assert own_id not in self._ids, f"two operations are called {own_id}"
        self._ids.add(own_id)
        described: dict[str, Any] = {
            "operationId": own_id,
            "tags": [operation.tag],
            "summary": operation.summary,
            "parameters": [*_of_path(route), *map(_parameter, operation.parameters)],
            "responses": self._responses(operation),
        }
        body = self._body(operation)
        if body is not None:
            described["requestBody"] = body
        if self._keys.are_on:
            needs: list[dict[str, Any]] = (
                [] if operation.right == "open" else [{"bearer": []}, {"apiKey": []}]
            )
            described["security"] = needs
        return described

    def _body(self, operation: Operation) -> dict[str, Any] | None:
        if operation.takes_bytes:
            return {"required": True, "content": {BYTES: {"schema": {}}}}
        if operation.body is None:
            return None
        content: dict[str, Any] = {"schema": self._body_schemas[operation.body]}
        if operation.example is not None:
            content["example"] = operation.example
        return {"required": not operation.body_is_optional, "content": {JSON: content}}

    def _responses(self, operation: Operation) -> dict[str, Any]:
        responses = {
            "200": {
                "description": "What was asked for.",
                "headers": _headers(operation.headers),
                **self._content(operation),
            }
        }
        errors: dict[int, type[TopworkError]] = {Internal.status: Internal}
        if operation.right != "open" and self._keys.are_on:
            errors[Unauthorized.status] = Unauthorized
        if self._keys.refuses_pages:
            errors[Forbidden.status] = Forbidden
        if operation.body is not None or operation.takes_bytes:
            errors[RequestTimeout.status] = RequestTimeout
        for error in operation.all_errors:
            if error.status != 403 or self._keys.may_forbid:
                errors.setdefault(error.status, error)
        for status in sorted(errors):
            responses[str(status)] = self._error(operation, errors[status])
        if operation.unwell is not None:
            responses["503"] = {
                "description": "It is not so; the body says why.",
                "headers": _headers(operation.headers),
                **self._content(operation, operation.unwell),
            }
        return responses

    def _content(self, operation: Operation, answer: Any = None) -> dict[str, Any]:
        answer = operation.answer if answer is None else answer
        content: dict[str, Any] = {}
        if answer is not None and answer is not type(None):
            content[JSON] = {"schema": self._answer_schemas[answer]}
        if operation.events:
            events = [self._answer_schemas[one] for one in operation.events]
            content[EVENTS] = {
                # Some tools take it for the whole stream, which is text, others for each event, an
                # object: before OpenAPI 3.2 nothing says which.
                "schema": {"type": ["string", "object"]},
                # OpenAPI 3.2's itemSchema: of the data of each event, but for [DONE].
                "x-itemSchema": events[0] if len(events) == 1 else {"anyOf": events},
            }
        if operation.text:
            content[operation.text] = {"schema": {"type": "string"}}
        return {"content": content} if content else {}

    def _error(self, operation: Operation, error: type[TopworkError]) -> dict[str, Any]:
        """Return what refers to an error, which is the same wherever it has the same shape."""
        shape = operation.errors_as or ErrorReply
        name = error.__name__ if shape is ErrorReply else f"{error.__name__}As{shape.__name__}"
        if name not in self._errors:
            content: dict[str, Any] = {"schema": self._answer_schemas[shape]}
            if shape is ErrorReply:
                content["example"] = msgspec.to_builtins(error_body(error(_MEANINGS[error.status])))
            self._errors[name] = {
                "description": _MEANINGS[error.status],
                "headers": _headers_of_error(error),
                "content": {JSON: content},
            }
        return {"$ref": f"#/components/responses/{name}"}


def _answer_types(operations: Iterable[Operation]) -> list[Any]:
    types: list[Any] = [ErrorReply]
    for operation in operations:
        told = (operation.answer, operation.unwell, operation.errors_as, *operation.events)
        types += [one for one in told if one is not None and one is not type(None)]
    return types


def _of_path(route: APIRoute) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name in route.param_convertors
    ]


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": False,
        "description": parameter.what,
        "schema": dict(parameter.schema),
    }


def _headers(told: Mapping[str, str]) -> dict[str, Any]:
    headers = {name: _header(what) for name, what in told.items()}
    return headers | {"X-Request-Id": _header("the id of this call")}


def _headers_of_error(error: type[TopworkError]) -> dict[str, Any]:
    told: dict[str, str] = {}
    if error in (Overloaded, Unavailable):
        told["Retry-After"] = "seconds until it is worth another call, if known"
    if error is Unauthorized:
        told["WWW-Authenticate"] = "Bearer, and what is wrong with a token"
    return _headers(told)


def _header(what: str) -> dict[str, Any]:
    return {"description": what, "schema": {"type": "string"}}
