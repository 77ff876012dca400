"""Loading, unloading and listing adapters, spelled as vLLM spells them.

Knows nothing of what an adapter is made of.
"""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from cluster.adapters.record import AdapterRecord
from cluster.router.http import body_of, read_body
from cluster.router.router import Router
from cluster.router.schedulers import Report
from cluster.router.schemas import LoadAdapterBody, UnloadAdapterBody


class SlotPlace(msgspec.Struct):
    """A scheduler replica that has the adapter in a slot."""

    replica: str
    slot: int
    loading: bool
    leases: int


class AdapterEntry(msgspec.Struct):
    """One name in the catalogue and where its content is now."""

    name: str
    digest: str
    version: int
    path: str
    lora_rank: int
    num_bytes: int
    modules: tuple[str, ...]
    pinned: bool
    tier: str  # "device" if in any slot, else where the pool would take it from
    leases: int  # sequences that hold it, over all replicas
    slots: list[SlotPlace]


def _entry(record: AdapterRecord, reports: tuple[Report, ...]) -> AdapterEntry:
    slots = [
        SlotPlace(report.replica, slot.slot, slot.loading, slot.leases)
        for report in reports
        if report.status is not None
        for slot in report.status.slots
        if slot.adapter == record.digest
    ]
    return AdapterEntry(
        name=record.name,
        digest=record.digest,
        version=record.version,
        path=record.path,
        lora_rank=record.lora_rank,
        num_bytes=record.num_bytes,
        modules=record.modules,
        pinned=record.pinned,
        tier="device" if any(not place.loading for place in slots) else record.tier,
        leases=sum(place.leases for place in slots),
        slots=slots,
    )


def adapter_routes(router: Router) -> APIRouter:
    """Return the routes of adapters."""
    routes = APIRouter()

    @routes.post("/v1/load_lora_adapter", openapi_extra=body_of(LoadAdapterBody))
    async def load_lora_adapter(http: HttpRequest) -> Response:
        router.authenticate(http).require_admin()
        body = await read_body(http, LoadAdapterBody, router.config.max_body_bytes)
        body.refuse_extras()
        name = body.lora_name
        await router.load(name, body.lora_path, body.load_inplace, body.pinned)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", openapi_extra=body_of(UnloadAdapterBody))
    async def unload_lora_adapter(http: HttpRequest) -> Response:
        router.authenticate(http).require_admin()
        body = await read_body(http, UnloadAdapterBody, router.config.max_body_bytes)
        body.refuse_extras()
        await router.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @routes.get("/v1/adapters")
    async def list_adapters(http: HttpRequest) -> Response:
        principal = router.authenticate(http)
        reports = await router.schedulers.reports()
        entries = [
            _entry(record, reports)
            for record in await router.backend.records()
            if principal.may_use(record.name)
        ]
        body = {"object": "list", "data": entries}
        return Response(msgspec.json.encode(body), media_type="application/json")

    return routes
