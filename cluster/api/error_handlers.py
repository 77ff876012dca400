"""Errors as HTTP responses in OpenAI's shape.

Owns the body {"error": {message, type, param, code}} and the headers that go with it.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.errors import Internal, InvalidRequest, NotFound, TopworkError, Unauthorized

CLIENT_CLOSED_REQUEST = 499  # nobody reads the response; access logs know the number


def error_body(error: TopworkError) -> dict[str, Any]:
    """Return the body of an error."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code if error.code is not None else error.status,
        }
    }


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
    """Return the first of pydantic's findings as our error, without the input."""
    first = error.errors(include_input=False, include_url=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {first['ctx']['error']}"[:500])
    if not first["loc"]:
        return InvalidRequest(f"the body is not what this call takes: {first['msg']}"[:500])
    param = ".".join(str(part) for part in first["loc"])[:200]
    return InvalidRequest(f"{param}: {first['msg']}"[:500], param)


def add_error_handlers(app: FastAPI) -> None:
    """Make an application answer every error in this shape."""

    async def on_topwork_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, TopworkError), f"handler called for {type(error).__name__}"
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), f"handler called for {type(error).__name__}"
        route = f"{request.method} {request.url.path[:200]}"
        body = {
            "error": {
                "message": f"{error.detail}: {route}",
                "type": NotFound.kind if error.status_code == 404 else InvalidRequest.kind,
                "param": None,
                "code": error.status_code,
            }
        }
        headers = dict(error.headers or {})
        return Response(msgspec.json.encode(body), error.status_code, headers, "application/json")

    async def on_unexpected(_: Request, error: Exception) -> Response:
        return error_response(Internal(f"an internal error: {type(error).__name__}"))

    async def on_client_disconnect(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientDisconnect, on_client_disconnect)
    app.add_exception_handler(TopworkError, on_topwork_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_unexpected)
