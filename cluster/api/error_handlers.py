"""Errors as HTTP responses, in OpenAI's shape where a route has no other.

Owns the body {"error": {message, type, param, code}} and the headers that go with it.
"""

from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.errors import (
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    TopworkError,
    Unauthorized,
)
from cluster.router.request_log.entry import current_entry

CLIENT_CLOSED_REQUEST = 499  # nobody reads the response; access logs know the number


class ErrorDetails(msgspec.Struct):
    """What went wrong; `code` is the status where no word says more."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorReply(msgspec.Struct):
    """The body of an error, and the last event of a stream that broke off."""

    error: ErrorDetails


# How some routes spell their errors.
ErrorShape = Callable[[Request, TopworkError], Response]


def error_body(error: TopworkError) -> ErrorReply:
    """Return the body of an error."""
    code = error.code if error.code is not None else error.status
    return ErrorReply(ErrorDetails(error.message, error.kind, error.param, code))


def error_response(error: TopworkError) -> Response:
    """Return the whole response of an error."""
    return error_response_as(error_body(error), error)


def error_response_as(body: object, error: TopworkError) -> Response:
    """Return an error with a body of another shape, and its own status and headers."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(msgspec.json.encode(body), error.status, headers, "application/json")


def validation_error(error: ValidationError) -> InvalidRequest:
    """Return the first of pydantic's findings as our error, without the input.

    Its type (`missing`, `less_than_equal`, ...) stands behind it: vLLM's clients look for it.
    """
    first = error.errors(include_input=False, include_url=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {first['ctx']['error']}"[:500])
    if not first["loc"]:
        return InvalidRequest(f"the body is not what this call takes: {first['msg']}"[:500])
    param = ".".join(str(part) for part in first["loc"])[:200]
    return InvalidRequest(f"{param}: {first['msg']}"[:450] + f" ({first['type']})", param)


def unexpected_response(
    shapes: Mapping[str, ErrorShape],
) -> Callable[[Request, Exception], Response]:
    """Return what answers an error that is a bug; `shapes` as in `add_error_handlers`."""

    def respond(http: Request, error: Exception) -> Response:
        return _respond(shapes, http, Internal(f"an internal error: {type(error).__name__}"))

    return respond


def _respond(shapes: Mapping[str, ErrorShape], http: Request, error: TopworkError) -> Response:
    entry = current_entry()
    if entry is not None:
        entry.failed(error)
    path = http.url.path
    for prefix, shape in shapes.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return shape(http, error)
    return error_response(error)


def add_error_handlers(
    app: FastAPI, shapes: Mapping[str, ErrorShape], *, sends_ids: bool = True
) -> None:
    """Make an application answer every error.

    Args:
        shapes: of the errors of a path and of those below it, where they are not OpenAI's.
        sends_ids: whether an unexpected error carries the id of its request, which is made outside
            of what gives it to all other responses.
    """

    respond = partial(_respond, shapes)
    unexpected = unexpected_response(shapes)

    async def on_topwork_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, TopworkError), f"handler called for {type(error).__name__}"
        return respond(http, error)

    async def on_http_exception(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), f"handler called for {type(error).__name__}"
        known: dict[int, type[TopworkError]] = {404: NotFound, 405: MethodNotAllowed}
        kind = known.get(error.status_code, InvalidRequest)
        response = respond(http, kind(f"{error.detail}: {http.method} {http.url.path[:200]}"))
        response.headers.update(error.headers or {})
        return response

    async def on_unexpected(http: Request, error: Exception) -> Response:
        response = unexpected(http, error)
        if sends_ids:
            response.headers["x-request-id"] = http.state.request_id
        return response

    async def on_client_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientDisconnect, on_client_disconnect)
    app.add_exception_handler(TopworkError, on_topwork_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_unexpected)
