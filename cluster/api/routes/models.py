"""GET /v1/models: the base model and the adapters that the caller may use.

Knows nothing of schedulers.
"""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.adapters.records import AdapterRecord
from cluster.api.pagination import page_of
from cluster.api.schemas.responses import ModelCard, ModelList
from cluster.errors import NotFound
from cluster.router.error_responses import model_not_found
from cluster.router.router import Router


def _base_card(router: Router) -> ModelCard:
    config = router.config
    return ModelCard(
        id=config.model_name,
        created=router.started_at,
        root=config.model_name,
        parent=None,
        max_model_len=config.context_length,
    )


def _adapter_card(router: Router, record: AdapterRecord) -> ModelCard:
    return ModelCard(
        id=record.name,
        created=router.started_at,
        root=record.path,
        parent=router.config.model_name,
        max_model_len=router.config.context_length,
    )


def model_routes(router: Router) -> APIRouter:
    """Return the routes of models."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def list_models(http: HttpRequest) -> Response:
        principal = router.authenticate(http)
        page = page_of(http)
        cards = [] if page.after else [_base_card(router)]
        usable = [r for r in await router.backend.records() if principal.may_use(r.name)]
        records, _ = page.cut(usable)
        cards += [_adapter_card(router, record) for record in records]
        return Response(msgspec.json.encode(ModelList(cards)), media_type="application/json")

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(http: HttpRequest, name: str) -> Response:
        principal = router.authenticate(http)
        if name == router.config.model_name:
            card = _base_card(router)
        else:
            principal.require_adapter(name)
            try:
                card = _adapter_card(router, await router.backend.record(name))
            except NotFound:
                raise model_not_found(name) from None
        return Response(msgspec.json.encode(card), media_type="application/json")

    return routes
