"""GET /v1/models: the base model and the adapters that the caller may use."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.adapters.records import AdapterRecord
from cluster.api.auth import Authenticator
from cluster.api.http import json_response, page_query
from cluster.api.openapi.operation import AFTER, LIMIT, LISTING, Operation, declared
from cluster.api.schemas.responses import ModelCard, ModelList
from cluster.errors import NotFound, Unavailable
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


LIST = Operation(
    tag="models",
    summary="Lists the base model and the adapters that the caller may use.",
    right="any",
    answer=ModelList,
    errors=LISTING,
    parameters=(LIMIT, AFTER),
)
RETRIEVE = Operation(
    tag="models",
    summary="Shows one of them.",
    right="model",
    answer=ModelCard,
    errors=(NotFound, Unavailable),
)


def model_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of models."""
    routes = APIRouter()

    @routes.get("/v1/models", openapi_extra=declared(LIST))
    async def list_models(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        page = page_query(http)
        cards = [] if page.after else [_base_card(router)]
        usable = [r for r in await router.backend.records() if principal.may_use(r.name)]
        records, _ = page.cut(usable)
        cards += [_adapter_card(router, record) for record in records]
        return json_response(ModelList(cards))

    @routes.get("/v1/models/{name:path}", openapi_extra=declared(RETRIEVE))
    async def retrieve_model(http: HttpRequest, name: str) -> Response:
        principal = keys.authenticate(http)
        if name == router.config.model_name:
            card = _base_card(router)
        else:
            card = _adapter_card(router, await router.models.record(name, principal))
        return json_response(card)

    return routes
