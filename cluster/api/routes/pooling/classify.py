"""POST /v1/classify: the classes of prompts, by a head of the model or an adapter."""

import asyncio
import time
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.http import (
    extra_parameters_of,
    json_response,
    read_body,
    unless_disconnected,
)
from cluster.api.middleware.rate_limits import let_in
from cluster.api.openapi.operation import GENERATION, Operation, declared
from cluster.api.pooling import (
    Logits,
    PoolingCall,
    activated,
    class_logits,
    classifier_of,
    pooling_call,
    prompts_of,
)
from cluster.api.schemas.pooling import Classification, Classifications, ClassifyBody, PoolingUsage
from cluster.errors import InvalidRequest
from cluster.router.bodies.validation import MAX_VALUES_OF_TOKENS
from cluster.router.router import Router
from cluster.router.tenancy.principal import Principal
from worker.classifier_config import ClassifierConfig

CLASSIFY = Operation(
    tag="inference",
    summary="Classifies prompts by a head of the model or an adapter.",
    right="model",
    body=ClassifyBody,
    answer=Classifications,
    errors=GENERATION,
    example={"model": "sentiment", "input": ["I loved it", "never again"]},
)


def classify_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes that classify."""
    routes = APIRouter()

    async def classify(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        await let_in(http, router, principal)
        body = await read_body(
            http, ClassifyBody, router.config.max_body_bytes, MAX_VALUES_OF_TOKENS
        )
        body.refuse_extras(extras=extra_parameters_of(http))
        return await unless_disconnected(http, _create(http, router, principal, body))

    for name, path in (("classify", "/v1/classify"), ("classify_unversioned", "/classify")):
        routes.post(path, name=name, openapi_extra=declared(CLASSIFY))(classify)
    return routes


async def _create(
    http: HttpRequest, router: Router, principal: Principal, body: ClassifyBody
) -> Response:
    call = await pooling_call(http, router, principal, body)
    classifier = classifier_of(router, call.model)
    if classifier is None:
        raise InvalidRequest(
            f"model: {body.model[:256]!r} has no classification head: neither the base model nor "
            "the adapter brings a score",
            "model",
        )
    tokenized = await prompts_of(router, body)
    logits = await class_logits(router, call, tokenized)
    num_tokens = sum(map(len, tokenized))
    # A million numbers as text take a second, which the streams have not.
    return await asyncio.to_thread(_response, call, classifier, logits, num_tokens)


def _response(
    call: PoolingCall, classifier: ClassifierConfig, logits: Sequence[Logits], num_tokens: int
) -> Response:
    activation = "identity" if call.body.use_activation is False else classifier.activation
    data = [
        Classification(
            index=index,
            label=classifier.labels[int(one.argmax())],
            probs=activated(one, activation).tolist(),
            num_classes=len(one),
        )
        for index, one in enumerate(logits)
    ]
    return json_response(
        Classifications(
            id=f"classify-{call.request_id}",
            created=int(time.time()),
            model=call.body.model,
            data=data,
            usage=PoolingUsage(num_tokens, num_tokens),
        )
    )
