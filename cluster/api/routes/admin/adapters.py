"""Loading, unloading and listing adapters, spelled as vLLM spells them, their versions and pins."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from cluster.adapters.records import AdapterRecord, LoadOptions, UnloadResult
from cluster.api.auth import Authenticator
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
    adapter_not_found,
    model_not_found,
)
from cluster.router.router import Router

LOAD = Operation(
    tag="adapters",
    summary="Loads an adapter under a name, as vLLM spells it.",
    right="adapters:load",
    body=LoadAdapterBody,
    answer=LoadedAdapter,
    text=TEXT,
    errors=CHANGE,
    example={"lora_name": "json", "lora_path": "/adapters/json"},
)
UNLOAD = Operation(
    tag="adapters",
    summary="Unloads an adapter, as vLLM spells it.",
    right="adapters:load",
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
    right="adapters:load",
    body=RollbackBody,
    body_is_optional=True,
    answer=AdapterEntry,
    errors=CHANGE,
    example={"version": 1},
)
SPLIT = Operation(
    tag="adapters",
    summary="Gives shares of the requests to versions.",
    right="adapters:load",
    body=SplitBody,
    answer=AdapterEntry,
    errors=CHANGE,
    example={"1": 90, "2": 10},
)
PIN = Operation(
    tag="adapters",
    summary="Keeps an adapter in a slot of every rank.",
    right="adapters:load",
    body=PinBody,
    body_is_optional=True,
    answer=AdapterEntry,
    errors=CHANGE,
)
UNPIN = Operation(
    tag="adapters",
    summary="Takes a pin back.",
    right="adapters:load",
    answer=AdapterEntry,
    errors=(NotFound, Unavailable),
)
LIST = Operation(
    tag="adapters",
    summary="Lists the adapters that the caller may see, and where they are.",
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


def adapter_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of adapters."""
    routes = APIRouter()
    _add_loading(routes, router, keys)
    _add_versions(routes, router, keys)
    _add_pins(routes, router, keys)
    _add_listing(routes, router, keys)
    return routes


def _add_loading(routes: APIRouter, router: Router, keys: Authenticator) -> None:
    max_bytes = router.config.max_body_bytes

    @routes.post("/v1/load_lora_adapter", openapi_extra=declared(LOAD))
    async def load_lora_adapter(http: HttpRequest) -> Response:
        with keys.administrative(http, "load", "adapters:load") as call:
            body = await read_body(http, LoadAdapterBody, max_bytes)
            body.refuse_extras()
            name, root, caller = body.lora_name, call.principal.adapter_root, call.principal.caller
            options = LoadOptions(body.load_inplace, body.pinned, body.sha256, root, caller)
            call.load(
                name,
                path=body.lora_path,
                load_inplace=body.load_inplace,
                pinned=body.pinned,
                sha256=body.sha256,
            )
            record = await router.load(name, body.lora_path, options)
        said = f"Success: LoRA adapter '{name}' added successfully."
        if not wants_json(http):
            return PlainTextResponse(said)
        entry = entry_of(record, slots_by_digest(await router.replicas.reports()))
        return json_response(LoadedAdapter(**msgspec.structs.asdict(entry), message=said))

    @routes.post("/v1/unload_lora_adapter", openapi_extra=declared(UNLOAD))
    async def unload_lora_adapter(http: HttpRequest) -> Response:
        with keys.administrative(http, "unload", "adapters:load") as call:
            body = await read_body(http, UnloadAdapterBody, max_bytes)
            body.refuse_extras()
            force = body.force or http.query_params.get("force", "").lower() in ("true", "1")
            call.change(body.lora_name, adapter_not_found(body.lora_name), force=force)
            result = await router.unload(body.lora_name, force)
        if wants_json(http):
            return json_response(result)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _add_versions(routes: APIRouter, router: Router, keys: Authenticator) -> None:
    max_bytes = router.config.max_body_bytes

    @routes.post("/v1/adapters/{name:path}/rollback", openapi_extra=declared(ROLLBACK))
    async def roll_back(http: HttpRequest, name: str) -> Response:
        with keys.administrative(http, "rollback", "adapters:load") as call:
            call.change(name, model_not_found(name))
            has_body = _has_body(http)
            body = await read_body(http, RollbackBody, max_bytes) if has_body else RollbackBody()
            body.refuse_extras()
            call.entry.about(version=body.version)
            with _as_not_found(name):
                record = await router.backend.rollback(name, body.version)
        return await shown_record(router, record)

    @routes.post("/v1/adapters/{name:path}/split", openapi_extra=declared(SPLIT))
    async def split(http: HttpRequest, name: str) -> Response:
        with keys.administrative(http, "split", "adapters:load") as call:
            call.change(name, model_not_found(name))
            body = await read_body(http, SplitBody, max_bytes)
            shares = {int(version): share for version, share in body.root.items()}
            told = ", ".join(f"{version}: {share} %" for version, share in shares.items())
            call.entry.about(shares=told)
            with _as_not_found(name):
                record = await router.backend.split(name, shares)
        return await shown_record(router, record)


def _add_pins(routes: APIRouter, router: Router, keys: Authenticator) -> None:
    max_bytes = router.config.max_body_bytes

    @routes.post("/v1/adapters/{name:path}/pin", openapi_extra=declared(PIN))
    async def pin(http: HttpRequest, name: str) -> Response:
        with keys.administrative(http, "pin", "adapters:load") as call:
            call.change(name, model_not_found(name))
            if _has_body(http):
                (await read_body(http, PinBody, max_bytes)).refuse_extras()
            with _as_not_found(name):
                record = await router.backend.pin(name, call.principal.caller)
        return await shown_record(router, record)

    @routes.delete("/v1/adapters/{name:path}/pin", openapi_extra=declared(UNPIN))
    async def unpin(http: HttpRequest, name: str) -> Response:
        with keys.administrative(http, "unpin", "adapters:load") as call:
            call.change(name, model_not_found(name))
            with _as_not_found(name):
                record = await router.backend.unpin(name)
        return await shown_record(router, record)


def _add_listing(routes: APIRouter, router: Router, keys: Authenticator) -> None:
    @routes.get("/v1/adapters", openapi_extra=declared(LIST))
    async def list_adapters(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        page = page_query(http)
        by_digest = slots_by_digest(await router.replicas.reports())
        visible = [r for r in await router.backend.records() if principal.may_see(r.name)]
        records, has_more = page.cut(visible)
        entries = [entry_of(record, by_digest) for record in records]
        return json_response(AdapterList(entries, has_more, records[-1].name if records else None))

    @routes.get("/v1/adapters/{name:path}", openapi_extra=declared(RETRIEVE))
    async def retrieve_adapter(http: HttpRequest, name: str) -> Response:
        if not keys.authenticate(http).may_see(name):
            raise model_not_found(name)
        with _as_not_found(name):
            record = await router.backend.record(name)
        return await shown_record(router, record)


@contextmanager
def _as_not_found(name: str) -> Iterator[None]:
    """Let a name that nothing has be told as one that the caller may not see."""
    try:
        yield
    except NotFound as error:
        if error.code == MODEL_NOT_FOUND:
            raise model_not_found(name) from None
        raise
