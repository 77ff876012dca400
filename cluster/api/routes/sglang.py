"""Loading and unloading adapters as SGLang's server spells it.

Owns that spelling: its routes, and one shape for success and failure alike. The work and the
rights are those of `routes.adapters`; the status of a failure is ours, where SGLang always says
400.
"""

from collections.abc import Awaitable, Callable
from itertools import islice

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.adapters.records import LoadOptions
from cluster.api.auth import AdministrativeCall, Authenticator
from cluster.api.error_handlers import error_response_as
from cluster.api.http import json_response, read_body
from cluster.api.openapi.operation import CHANGE, Operation, declared
from cluster.api.schemas.adapters import AdapterName, AdapterPath
from cluster.api.schemas.requests import Body
from cluster.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    TopworkError,
    Unavailable,
    adapter_not_found,
)
from cluster.router.router import Router
from cluster.router.tenancy.audit_log import Action
from cluster.router.tenancy.principal import Principal

SGLANG_PATHS = ("/load_lora_adapter", "/unload_lora_adapter", "/load_lora_adapter_from_tensors")
MAX_SHOWN = 1000  # adapters in one answer


class SglangLoadBody(Body):
    """POST /load_lora_adapter."""

    lora_name: AdapterName
    lora_path: AdapterPath
    pinned: bool = False


class SglangUnloadBody(Body):
    """POST /unload_lora_adapter."""

    lora_name: AdapterName


class LoraUpdate(msgspec.Struct):
    """What came of loading or unloading."""

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str] | None = None  # path by name; null after a failure


LOAD = Operation(
    tag="adapters",
    summary="Loads an adapter under a name, as SGLang spells it.",
    right="adapters:load",
    body=SglangLoadBody,
    answer=LoraUpdate,
    errors=CHANGE,
    errors_as=LoraUpdate,
    example={"lora_name": "json", "lora_path": "/adapters/json"},
    ids={"post": "load_lora_adapter_as_sglang"},
)
UNLOAD = Operation(
    tag="adapters",
    summary="Unloads an adapter, as SGLang spells it.",
    right="adapters:load",
    body=SglangUnloadBody,
    answer=LoraUpdate,
    errors=(InvalidRequest, NotFound, Conflict, Unavailable),
    errors_as=LoraUpdate,
    example={"lora_name": "json"},
    ids={"post": "unload_lora_adapter_as_sglang"},
)


async def _loaded(router: Router, principal: Principal, first: str) -> dict[str, str] | None:
    """Return the path of the adapter that is called `first`, if any, and of others by name."""
    try:
        records = [r for r in await router.backend.records() if principal.may_see(r.name)]
    except Unavailable:
        return None  # what was asked for is done, which is worth more
    records.sort(key=lambda record: record.name != first)
    return {record.name: record.path for record in islice(records, MAX_SHOWN)}


async def respond_as_sglang(
    router: Router,
    keys: Authenticator,
    http: HttpRequest,
    action: Action,
    work: Callable[[AdministrativeCall], Awaitable[str]],
) -> Response:
    """Do the work, which returns the name it was about, for who may."""
    with keys.administrative(http, action, "adapters:load") as call:
        name = await work(call)
    loaded = await _loaded(router, call.principal, name)
    return json_response(LoraUpdate(True, loaded_adapters=loaded))


def sglang_error(_: HttpRequest, error: TopworkError) -> Response:
    """Return an error in SGLang's shape."""
    return error_response_as(LoraUpdate(False, error.message), error)


def sglang_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()
    max_bytes = router.config.max_body_bytes

    @routes.post("/load_lora_adapter", openapi_extra=declared(LOAD))
    async def load_lora_adapter(http: HttpRequest) -> Response:
        async def load(call: AdministrativeCall) -> str:
            body = await read_body(http, SglangLoadBody, max_bytes)
            body.refuse_extras()
            root, caller = call.principal.adapter_root, call.principal.caller
            options = LoadOptions(False, body.pinned, root=root, caller=caller)
            call.load(body.lora_name, path=body.lora_path, pinned=body.pinned)
            await router.load(body.lora_name, body.lora_path, options)
            return body.lora_name

        return await respond_as_sglang(router, keys, http, "load", load)

    @routes.post("/unload_lora_adapter", openapi_extra=declared(UNLOAD))
    async def unload_lora_adapter(http: HttpRequest) -> Response:
        async def unload(call: AdministrativeCall) -> str:
            body = await read_body(http, SglangUnloadBody, max_bytes)
            body.refuse_extras()
            call.change(body.lora_name, adapter_not_found(body.lora_name))
            await router.unload(body.lora_name)
            return body.lora_name

        return await respond_as_sglang(router, keys, http, "unload", unload)

    return routes
