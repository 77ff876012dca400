"""Health, readiness, version, metrics, draining and the reset of prefix caches.

Owns what "healthy" means for the whole: every scheduler replica answers and makes progress, but for
those that have just been added and are not up yet.
"""

import asyncio
import time
from types import NoneType

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.adapters.records import AdapterRecord
from cluster.api.auth import Authenticator
from cluster.api.http import json_response
from cluster.api.openapi.operation import FLAG, LISTING, TEXT, Operation, Parameter, declared
from cluster.api.schemas.operations import (
    Draining,
    Health,
    Readiness,
    Remaining,
    Resets,
    SchedulerReset,
    Undrained,
    Version,
)
from cluster.errors import InvalidRequest, Unavailable
from cluster.router.metrics.exposition import CONTENT_TYPE, View, exposition
from cluster.router.replica_set import Report
from cluster.router.router import Router

HEALTH = Operation(
    tag="operations",
    summary="Tells whether every scheduler answers and every rank makes progress.",
    right="open",
    answer=Health,
    unwell=Health,
)
PING = Operation(
    tag="operations",
    summary="The status of /health with an empty body, as SageMaker asks for it.",
    right="open",
    unwell=NoneType,
    ids={"get": "ping", "post": "post_ping"},
)
READY = Operation(
    tag="operations",
    summary="Tells whether a scheduler takes requests.",
    right="open",
    answer=Readiness,
    unwell=Readiness,
)
VERSION = Operation(tag="operations", summary="Tells what runs here.", right="open", answer=Version)
METRICS = Operation(
    tag="operations",
    summary="Shows the metrics of the whole cluster, for Prometheus.",
    right="metrics",
    text=TEXT,
)
RESET = Operation(
    tag="operations",
    summary="Forgets cached prefixes.",
    right="drain",
    answer=Resets,
    errors=LISTING,
    parameters=(
        Parameter("reset_running_requests", FLAG, "must not be on"),
        Parameter("reset_external", FLAG, "without effect: host memory is reset with the rest"),
    ),
)
DRAIN = Operation(
    tag="operations",
    summary="Refuses new calls at all routers; tells what is left to do.",
    right="drain",
    answer=Draining,
    errors=(Unavailable,),
)
UNDRAIN = Operation(
    tag="operations",
    summary="Takes calls again.",
    right="drain",
    answer=Undrained,
    errors=(Unavailable,),
)


def reasons_against_health(reports: tuple[Report, ...]) -> list[str]:
    """Return what keeps the whole from being healthy; nothing if it is."""
    if not reports:
        return ["no scheduler is up"]
    reasons = []
    # One that is added to others takes no request before it is up.
    started = [r for r in reports if r.status is None or not r.status.starting]
    for report in started or reports:
        if report.status is None:
            reasons.append(f"scheduler {report.replica} does not answer")
        elif not report.status.healthy:
            reasons.append(f"scheduler {report.replica}: {report.status.reason or 'unhealthy'}")
    return reasons


def _rest_of(report: Report) -> Remaining:
    """Return what a scheduler still has to do."""
    if report.status is None:
        return Remaining(report.replica, error="does not answer")
    scheduler = report.status.scheduler
    return Remaining(report.replica, scheduler.num_running, scheduler.num_waiting)


async def _view(router: Router) -> View:
    """Return what the metrics of the whole are drawn from, as of now."""
    config = router.config
    cluster, reports = await asyncio.gather(router.aggregation.collect(), router.replicas.reports())
    records: tuple[AdapterRecord, ...] | None
    try:
        records = await router.backend.records()
    except Unavailable:
        records = None  # the rest is worth more than the catalogue
    return View(
        version=config.version,
        model=config.model_name,
        page_size=config.page_size,
        context_length=config.context_length,
        max_labels=config.max_adapter_labels,
        cluster=cluster,
        reports=reports,
        records=records,
        vllm_time=time.time() if config.vllm_metrics else None,
    )


def check_reset(http: HttpRequest) -> None:
    """Check what the query of a reset asks for, in vLLM's words.

    Raises:
        InvalidRequest: if that is not done here, or not known.
    """
    for name, value in sorted(http.query_params.multi_items()):
        param = name[:100]
        if name not in ("reset_running_requests", "reset_external"):
            raise InvalidRequest(f"{param} is not a known parameter", param)
        if value.lower() not in ("true", "false", "1", "0"):
            raise InvalidRequest(f"{param}: must be true or false", param)
        # There is no cache outside: host memory is reset with the rest, asked for or not.
        if name == "reset_running_requests" and value.lower() in ("true", "1"):
            raise InvalidRequest(
                f"{param} is not supported: what a running request has computed is right, and "
                "it keeps it to its end; wait for that, or abort it",
                param,
                "unsupported_parameter",
            )


def operation_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of operations; probes need no key, and are told no reasons without one."""
    routes = APIRouter()

    def told(http: HttpRequest, reasons: list[str]) -> list[str] | UnsetType:
        return reasons if keys.may(http, "metrics") else UNSET

    @routes.get("/health", openapi_extra=declared(HEALTH))
    async def health(http: HttpRequest) -> Response:
        reasons = reasons_against_health(await router.replicas.reports())
        if reasons:
            return json_response(Health("unhealthy", told(http, reasons)), 503)
        return json_response(Health("ok"))

    @routes.get("/ping", openapi_extra=declared(PING))
    @routes.post("/ping", openapi_extra=declared(PING))
    async def ping() -> Response:
        reasons = reasons_against_health(await router.replicas.reports())
        return Response(status_code=503 if reasons else 200)  # SageMaker reads no more

    @routes.get("/ready", openapi_extra=declared(READY))
    async def ready(http: HttpRequest) -> Response:
        reports = await router.replicas.reports()
        if router.is_draining:
            return json_response(Readiness("draining"), 503)
        if not any(report.status is not None and report.status.ready for report in reports):
            reasons = reasons_against_health(reports)
            return json_response(Readiness("not ready", told(http, reasons)), 503)
        return json_response(Readiness("ready"))

    @routes.get("/version", openapi_extra=declared(VERSION))
    async def version() -> Response:
        return json_response(Version(router.config.version))

    @routes.get("/metrics", openapi_extra=declared(METRICS))
    async def metrics(http: HttpRequest) -> Response:
        keys.require(http, "metrics")
        view = await _view(router)
        text = await asyncio.to_thread(exposition, view)  # of thousands of series: streams go on
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    @routes.post("/reset_prefix_cache", openapi_extra=declared(RESET))
    async def reset_prefix_cache(http: HttpRequest) -> Response:
        with keys.administrative(http, "reset_prefix_cache", "drain"):
            check_reset(http)
            resets = await router.replicas.reset_prefix_caches()
        counts = [SchedulerReset(name, **asdict(result)) for name, result in resets.items()]
        return json_response(Resets(counts))

    @routes.post("/v1/drain", openapi_extra=declared(DRAIN))
    async def drain(http: HttpRequest) -> Response:
        with keys.administrative(http, "drain", "drain"):
            await router.drain()
        reports = await router.replicas.reports()
        return json_response(
            Draining(
                refusing=f"all routers, within {router.config.refresh_interval:g} s",
                in_flight=sum(
                    report.status.scheduler.num_running + report.status.scheduler.num_waiting
                    for report in reports
                    if report.status is not None
                ),
                schedulers=[_rest_of(report) for report in reports],
            )
        )

    @routes.delete("/v1/drain", openapi_extra=declared(UNDRAIN))
    async def undrain(http: HttpRequest) -> Response:
        with keys.administrative(http, "undrain", "drain"):
            await router.backend.undrain()  # which all routers follow, this one too
        interval = router.config.refresh_interval
        return json_response(Undrained(f"all routers, within {interval:g} s"))

    return routes
