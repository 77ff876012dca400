"""/openapi.json, and the pages /docs and /redoc that show it.

They are the same for all callers. Where there are keys they need one, for they tell what runs here.
The pages ask for the document without a key: they are of use where a proxy gives one, or without
keys.
"""

from typing import Any

from fastapi import APIRouter
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.http import json_response

DOCUMENT = "/openapi.json"


def document_routes(title: str, document: dict[str, Any], keys: Authenticator) -> APIRouter:
    """Return the routes, which the document itself does not name."""
    routes = APIRouter(include_in_schema=False)

    @routes.get(DOCUMENT)
    async def openapi_document(http: HttpRequest) -> Response:
        keys.require(http, "metrics")
        return json_response(document)

    @routes.get("/docs")
    async def docs(http: HttpRequest) -> Response:
        keys.require(http, "metrics")
        return get_swagger_ui_html(openapi_url=_url_of(http), title=title)

    @routes.get("/redoc")
    async def redoc(http: HttpRequest) -> Response:
        keys.require(http, "metrics")
        return get_redoc_html(openapi_url=_url_of(http), title=title)

    return routes


def _url_of(http: HttpRequest) -> str:
    """Return where a browser finds the document, behind the prefix that a proxy has taken off."""
    prefix: str = http.scope.get("root_path", "")
    return prefix.rstrip("/") + DOCUMENT
