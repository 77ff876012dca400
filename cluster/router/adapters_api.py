"""Loading, unloading and listing adapters, spelled as vLLM spells them, and their versions.

Knows nothing of what an adapter is made of.
"""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from cluster.adapters.record import AdapterRecord, VersionRecord
from cluster.errors import NotFound
from cluster.router.errors_http import model_not_found
from cluster.router.http import body_of, read_body
from cluster.router.pages import page_of
from cluster.router.router import MODEL_NOT_FOUND, Router
from cluster.router.schedulers import Report
from cluster.router.schemas import LoadAdapterBody, RollbackBody, SplitBody, UnloadAdapterBody


class SlotPlace(msgspec.Struct):
    """A scheduler replica that has the adapter in a slot."""

    replica: str
    slot: int
    loading: bool
    leases: int


class VersionEntry(msgspec.Struct):
    """A version that is kept."""

    version: int
    digest: str | None  # null until its tensors are read, at its first request
    path: str
    share: int  # percent of the requests
    since: int  # the first kept version with the same digest
    tier: str
    leases: int  # sequences that hold it, over all replicas


class AdapterEntry(msgspec.Struct):
    """One name in the catalogue and where the content of its current version is now."""

    name: str
    digest: str | None
    version: int
    path: str
    lora_rank: int
    num_bytes: int
    modules: tuple[str, ...]
    pinned: bool
    watched: bool  # follows a directory of adapters
    tier: str  # "device" if in any slot, else where the pool would take it from
    leases: int  # sequences that hold it, over all replicas
    slots: list[SlotPlace]
    versions: list[VersionEntry]


class AdapterList(msgspec.Struct):
    """The response of GET /v1/adapters; `last_id` is what the next page comes `after`."""

    data: list[AdapterEntry]
    has_more: bool
    last_id: str | None
    object: str = "list"


PlacesByDigest = dict[str | None, list[SlotPlace]]


def places(reports: tuple[Report, ...]) -> PlacesByDigest:
    """Return the slots that each adapter is in, by digest."""
    by_digest: PlacesByDigest = {}
    for report in reports:
        for slot in report.status.slots if report.status is not None else ():
            place = SlotPlace(report.replica, slot.slot, slot.loading, slot.leases)
            by_digest.setdefault(slot.adapter, []).append(place)
    return by_digest


def _tier(tier: str, slots: list[SlotPlace]) -> str:
    return "device" if any(not place.loading for place in slots) else tier


def _version(record: VersionRecord, by_digest: PlacesByDigest) -> VersionEntry:
    slots = by_digest.get(record.digest, [])
    return VersionEntry(
        version=record.version,
        digest=record.digest,
        path=record.path,
        share=record.share,
        since=record.since,
        tier=_tier(record.tier, slots),
        leases=sum(place.leases for place in slots),
    )


def entry_of(record: AdapterRecord, by_digest: PlacesByDigest) -> AdapterEntry:
    """Return what is shown of an adapter."""
    slots = by_digest.get(record.digest, [])
    return AdapterEntry(
        name=record.name,
        digest=record.digest,
        version=record.version,
        path=record.path,
        lora_rank=record.lora_rank,
        num_bytes=record.num_bytes,
        modules=record.modules,
        pinned=record.pinned,
        watched=record.watched,
        tier=_tier(record.tier, slots),
        leases=sum(place.leases for place in slots),
        slots=slots,
        versions=[_version(version, by_digest) for version in record.versions],
    )


def wants_json(http: HttpRequest) -> bool:
    """Return whether the caller asks for JSON where vLLM answers with text."""
    return "application/json" in http.headers.get("accept", "")


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _has_body(http: HttpRequest) -> bool:
    return http.headers.get("content-length", "0") != "0" or "transfer-encoding" in http.headers


def adapter_routes(router: Router) -> APIRouter:
    """Return the routes of adapters."""
    routes = APIRouter()
    max_bytes = router.config.max_body_bytes

    async def shown(record: AdapterRecord) -> Response:
        return _json(entry_of(record, places(await router.schedulers.reports())))

    @routes.post("/v1/load_lora_adapter", openapi_extra=body_of(LoadAdapterBody))
    async def load_lora_adapter(http: HttpRequest) -> Response:
        router.authenticate(http).require_admin()
        body = await read_body(http, LoadAdapterBody, max_bytes)
        body.refuse_extras()
        name = body.lora_name
        record = await router.load(name, body.lora_path, body.load_inplace, body.pinned)
        if wants_json(http):
            return await shown(record)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", openapi_extra=body_of(UnloadAdapterBody))
    async def unload_lora_adapter(http: HttpRequest) -> Response:
        router.authenticate(http).require_admin()
        body = await read_body(http, UnloadAdapterBody, max_bytes)
        body.refuse_extras()
        force = body.force or http.query_params.get("force", "").lower() in ("true", "1")
        result = await router.unload(body.lora_name, force)
        if wants_json(http):
            return _json(result)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @routes.post("/v1/adapters/{name:path}/rollback", openapi_extra=body_of(RollbackBody))
    async def roll_back(http: HttpRequest, name: str) -> Response:
        router.authenticate(http).require_admin()
        body = await read_body(http, RollbackBody, max_bytes) if _has_body(http) else RollbackBody()
        body.refuse_extras()
        return await shown(await router.backend.rollback(name, body.version))

    @routes.post("/v1/adapters/{name:path}/split", openapi_extra=body_of(SplitBody))
    async def split(http: HttpRequest, name: str) -> Response:
        router.authenticate(http).require_admin()
        body = await read_body(http, SplitBody, max_bytes)
        shares = {int(version): share for version, share in body.root.items()}
        return await shown(await router.backend.split(name, shares))

    @routes.get("/v1/adapters")
    async def list_adapters(http: HttpRequest) -> Response:
        principal = router.authenticate(http)
        page = page_of(http)
        by_digest = places(await router.schedulers.reports())
        usable = [r for r in await router.backend.records() if principal.may_use(r.name)]
        records, has_more = page.cut(usable)
        entries = [entry_of(record, by_digest) for record in records]
        return _json(AdapterList(entries, has_more, records[-1].name if records else None))

    @routes.get("/v1/adapters/{name:path}")
    async def retrieve_adapter(http: HttpRequest, name: str) -> Response:
        router.authenticate(http).require_adapter(name)
        try:
            return await shown(await router.backend.record(name))
        except NotFound as error:
            if error.code == MODEL_NOT_FOUND:
                raise model_not_found(name) from None
            raise

    return routes
