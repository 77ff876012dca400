"""Loading, unloading and listing adapters, spelled as vLLM spells them, their versions and pins."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from cluster.adapters.records import AdapterRecord, UnloadResult
from cluster.api.auth import KeyRing
from cluster.api.http import json_response, page_query, read_body
from cluster.api.openapi.operation import (
    AFTER,
    CHANGE,
    FLAG,
    LIMIT,
    LISTING,
    TEXT,
    Operation,
    Parameter,
    declared,
)
from cluster.api.schemas.adapters import (
    AdapterEntry,
    AdapterList,
    LoadAdapterBody,
    LoadedAdapter,
    PinBody,
    RollbackBody,
    SplitBody,
    UnloadAdapterBody,
    entry_of,
    slots_by_digest,
)
from cluster.errors import (
    MODEL_NOT_FOUND,
    Conflict,
    InvalidRequest,
    NotFound,
    Unavailable,
    model_not_found,
)
from cluster.router.router import Router

LOAD = Operation(
    tag="adapters",
    summary="Loads an adapter under a name, as vLLM spells it.",
    right="admin",
    body=LoadAdapterBody,
    answer=LoadedAdapter,
    text=TEXT,
    errors=CHANGE,
    example={"lora_name": "json", "lora_path": "/adapters/json"},
)
UNLOAD = Operation(
    tag="adapters",
    summary="Unloads an adapter, as vLLM spells it.",
    right="admin",
    body=UnloadAdapterBody,
    answer=UnloadResult,
    text=TEXT,
    errors=(InvalidRequest, NotFound, Conflict, Unavailable),
    parameters=(Parameter("force", FLAG, "whether running answers are ended"),),
    example={"lora_name": "json"},
)
ROLLBACK = Operation(
    tag="adapters",
    summary="Goes back to an earlier version.",
    right="admin",
    body=RollbackBody,
    body_is_optional=True,
    answer=AdapterEntry,
    errors=CHANGE,
    example={"version": 1},
)
SPLIT = Operation(
    tag="adapters",
    summary="Gives shares of the requests to versions.",
    right="admin",
    body=SplitBody,
    answer=AdapterEntry,
    errors=CHANGE,
    example={"1": 90, "2": 10},
)
PIN = Operation(
    tag="adapters",
    summary="Keeps an adapter in a slot of every rank.",
    right="admin",
    body=PinBody,
    body_is_optional=True,
    answer=AdapterEntry,
    errors=CHANGE,
)
UNPIN = Operation(
    tag="adapters",
    summary="Takes a pin back.",
    right="admin",
    answer=AdapterEntry,
    errors=(NotFound, Unavailable),
)
LIST = Operation(
    tag="adapters",
    summary="Lists the adapters that the caller may use, and where they are.",
    right="any",
    answer=AdapterList,
    errors=LISTING,
    parameters=(LIMIT, AFTER),
)
RETRIEVE = Operation(
    tag="adapters",
    summary="Shows one of them.",
    right="model",
    answer=AdapterEntry,
    errors=(NotFound, Unavailable),
)


def wants_json(http: HttpRequest) -> bool:
    """Return whether the caller asks for JSON where vLLM answers with text."""
    return "application/json" in http.headers.get("accept", "")


def _has_body(http: HttpRequest) -> bool:
    return http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers


async def shown_record(router: Router, record: AdapterRecord) -> Response:
    """Return what is shown of an adapter as a response."""
    return json_response(entry_of(record, slots_by_digest(await router.replicas.reports())))


def adapter_routes(router: Router, keys: KeyRing) -> APIRouter:
    """Return the routes of adapters."""
    routes = APIRouter()
    _add_loading(routes, router, keys)
    _add_versions(routes, router, keys)
    _add_pins(routes, router, keys)
    _add_listing(routes, router, keys)
    return routes


def _add_loading(routes: APIRouter, router: Router, keys: KeyRing) -> None:
    max_bytes = router.config.max_body_bytes

    @routes.post("/v1/load_lora_adapter", openapi_extra=declared(LOAD))
    async def load_lora_adapter(http: HttpRequest) -> Response:
        keys.authenticate(http).require_admin()
        body = await read_body(http, LoadAdapterBody, max_bytes)
        body.refuse_extras()
        name = body.lora_name
        record = await router.load(
            name, body.lora_path, body.load_inplace, body.pinned, body.sha256
        )
        said = f"Success: LoRA adapter '{name}' added successfully."
        if not wants_json(http):
            return PlainTextResponse(said)
        entry = entry_of(record, slots_by_digest(await router.replicas.reports()))
        return json_response(LoadedAdapter(**msgspec.structs.asdict(entry), message=said))

    @routes.post("/v1/unload_lora_adapter", openapi_extra=declared(UNLOAD))
    async def unload_lora_adapter(http: HttpRequest) -> Response:
        keys.authenticate(http).require_admin()
        body = await read_body(http, UnloadAdapterBody, max_bytes)
        body.refuse_extras()
        force = body.force or http.query_params.get("force", "").lower() in ("true", "1")
        result = await router.unload(body.lora_name, force)
        if wants_json(http):
            return json_response(result)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _add_versions(routes: APIRouter, router: Router, keys: KeyRing) -> None:
    max_bytes = router.config.max_body_bytes

    @routes.post("/v1/adapters/{name:path}/rollback", openapi_extra=declared(ROLLBACK))
    async def roll_back(http: HttpRequest, name: str) -> Response:
        keys.authenticate(http).require_admin()
        body = await read_body(http, RollbackBody, max_bytes) if _has_body(http) else RollbackBody()
        body.refuse_extras()
        return await shown_record(router, await router.backend.rollback(name, body.version))

    @routes.post("/v1/adapters/{name:path}/split", openapi_extra=declared(SPLIT))
    async def split(http: HttpRequest, name: str) -> Response:
        keys.authenticate(http).require_admin()
        body = await read_body(http, SplitBody, max_bytes)
        shares = {int(version): share for version, share in body.root.items()}
        return await shown_record(router, await router.backend.split(name, shares))


def _add_pins(routes: APIRouter, router: Router, keys: KeyRing) -> None:
    max_bytes = router.config.max_body_bytes

    @routes.post("/v1/adapters/{name:path}/pin", openapi_extra=declared(PIN))
    async def pin(http: HttpRequest, name: str) -> Response:
        keys.authenticate(http).require_admin()
        if _has_body(http):
            (await read_body(http, PinBody, max_bytes)).refuse_extras()
        return await shown_record(router, await router.backend.pin(name))

    @routes.delete("/v1/adapters/{name:path}/pin", openapi_extra=declared(UNPIN))
    async def unpin(http: HttpRequest, name: str) -> Response:
        keys.authenticate(http).require_admin()
        return await shown_record(router, await router.backend.unpin(name))


def _add_listing(routes: APIRouter, router: Router, keys: KeyRing) -> None:
    @routes.get("/v1/adapters", openapi_extra=declared(LIST))
    async def list_adapters(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        page = page_query(http)
        by_digest = slots_by_digest(await router.replicas.reports())
        usable = [r for r in await router.backend.records() if principal.may_use(r.name)]
        records, has_more = page.cut(usable)
        entries = [entry_of(record, by_digest) for record in records]
        return json_response(AdapterList(entries, has_more, records[-1].name if records else None))

    @routes.get("/v1/adapters/{name:path}", openapi_extra=declared(RETRIEVE))
    async def retrieve_adapter(http: HttpRequest, name: str) -> Response:
        keys.authenticate(http).require_adapter(name)
        try:
            return await shown_record(router, await router.backend.record(name))
        except NotFound as error:
            if error.code == MODEL_NOT_FOUND:
                raise model_not_found(name) from None
            raise
