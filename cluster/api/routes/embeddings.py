"""POST /v1/embeddings: prompts as vectors.

A prompt goes through the scheduler like any other and ends where its first token would be drawn.
"""

import asyncio
import base64
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import KeyRing
from cluster.api.http import (
    arrival_of,
    json_response,
    read_body,
    request_id_of,
    unless_disconnected,
)
from cluster.api.openapi.operation import GENERATION, Operation, declared
from cluster.api.prompts.texts import prompt_tokens, prompts
from cluster.api.request_builder import max_tokens_of
from cluster.api.schemas.embeddings import Embedding, EmbeddingBody, Embeddings, EmbeddingUsage
from cluster.errors import InvalidRequest
from cluster.request import Request
from cluster.router.model_resolver import Principal, ResolvedModel
from cluster.router.output_processor import TextOptions
from cluster.router.pooling_config import PoolingConfig
from cluster.router.router import Router
from worker.protocol import SamplingParams

MAX_INPUTS = 2048  # OpenAI's
MAX_VALUES = 2**20  # of a body: token ids, nearly all of them
WAVE = 64  # prompts of one call that the schedulers have at once
_NO_TEXT = TextOptions((), include_stop=False, skip_special_tokens=True, min_tokens=0)


def check_dimensions(wanted: int | None, pooling: PoolingConfig) -> None:
    """Raise InvalidRequest unless vectors of this model may be cut to so many numbers."""
    if wanted is None or wanted == pooling.hidden_size:
        return
    if pooling.dimensions is None:
        raise InvalidRequest(
            f"dimensions: this model's vectors have {pooling.hidden_size} numbers, and its "
            "configuration does not say that they can be cut (is_matryoshka)",
            "dimensions",
        )
    if wanted > pooling.hidden_size or (pooling.dimensions and wanted not in pooling.dimensions):
        some = ", ".join(map(str, pooling.dimensions)) or f"1 to {pooling.hidden_size}"
        raise InvalidRequest(f"dimensions: {wanted} is none of this model's: {some}", "dimensions")


def encoded(vector: bytes, body: EmbeddingBody, pooling: PoolingConfig) -> msgspec.Raw:
    """Return a vector, [H] float32, cut and normalised, as JSON."""
    values = np.frombuffer(vector, dtype="<f4")
    if body.dimensions is not None:
        values = values[: body.dimensions]
    normalize = pooling.normalize
    for wanted in (body.use_activation, body.normalize):
        normalize = normalize if wanted is None else wanted
    if normalize:
        norm = float(np.linalg.norm(values.astype(np.float64)))
        values = (values / max(norm, 1e-12)).astype("<f4")
    if body.encoding_format == "base64":
        return msgspec.Raw(b'"' + base64.b64encode(values.tobytes()) + b'"')
    return msgspec.Raw(msgspec.json.encode(values.tolist()))


async def _tokens(router: Router, body: EmbeddingBody) -> list[tuple[int, ...]]:
    """Return the tokens of all inputs, each cut to what is asked for."""
    given = prompts(body.input, router.config, "input", MAX_INPUTS)
    tokenized = await prompt_tokens(router, given, body.add_special_tokens is not False)
    limit = body.truncate_prompt_tokens
    if limit is not None:
        if limit == 0:
            raise InvalidRequest("truncate_prompt_tokens: 0 leaves nothing", "input")
        longest = router.config.context_length - 1
        limit = longest if limit < 0 else limit
        tokenized = [token_ids[-limit:] for token_ids in tokenized]
    for token_ids in tokenized:
        max_tokens_of(len(token_ids), 1, None, router.config)
    return tokenized


def _requests(
    router: Router,
    principal: Principal,
    request_id: str,
    body: EmbeddingBody,
    model: ResolvedModel,
    tokenized: Sequence[tuple[int, ...]],
) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, pooling=router.pooling.pooling)
    priority = principal.priority(body.priority)
    return [
        Request(
            request_id=router.unique_id(request_id),
            adapter=model.adapter,
            token_ids=token_ids,
            sampling=sampling,
            max_tokens=1,  # where it ends
            cache_salt=body.cache_salt or "",
            priority=priority,
            tenant=principal.tenant,
            weight=principal.weight,
            adapter_bytes=model.adapter_bytes,
        )
        for token_ids in tokenized
    ]


async def _vectors(
    router: Router, model: ResolvedModel, requests: Sequence[Request], arrival: float
) -> list[bytes]:
    """Return the vectors of some prompts, once all have come."""
    generation = router.generate(model, [(one,) for one in requests], _NO_TEXT, arrival)
    with generation:
        while generation.is_running:
            await generation.receive()
    return [processor.pooled for processor in generation.processors]


EMBEDDINGS = Operation(
    tag="inference",
    summary="Makes vectors of prompts.",
    right="model",
    body=EmbeddingBody,
    answer=Embeddings,
    errors=GENERATION,
    example={"model": "smollm2", "input": ["Riga", "Latvia's capital"]},
)


def embedding_routes(router: Router, keys: KeyRing) -> APIRouter:
    """Return the routes of embeddings."""
    routes = APIRouter()

    @routes.post("/v1/embeddings", openapi_extra=declared(EMBEDDINGS))
    async def create_embeddings(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        body = await read_body(http, EmbeddingBody, router.config.max_body_bytes, MAX_VALUES)
        body.refuse_extras()
        if router.pooling.refusal:
            raise InvalidRequest(f"this model has no embeddings: {router.pooling.refusal}", "model")
        check_dimensions(body.dimensions, router.pooling)
        return await unless_disconnected(http, _create(http, router, principal, body))

    return routes


async def _create(
    http: HttpRequest, router: Router, principal: Principal, body: EmbeddingBody
) -> Response:
    request_id = body.request_id or request_id_of(http)
    parts = None if body.lora is None else tuple((one.name, one.weight) for one in body.lora)
    model = await router.models.resolve(body.model, parts, principal, request_id)
    tokenized = await _tokens(router, body)
    requests = _requests(router, principal, request_id, body, model, tokenized)
    created, pooling = int(time.time()), router.pooling
    data: list[Embedding] = []

    def add(vectors: Sequence[bytes]) -> None:
        for vector in vectors:
            data.append(Embedding(index=len(data), embedding=encoded(vector, body, pooling)))

    for start in range(0, len(requests), WAVE):
        wave = requests[start : start + WAVE]
        # A million numbers as text take a second, which the streams have not.
        await asyncio.to_thread(add, await _vectors(router, model, wave, arrival_of(http)))
    num_tokens = sum(map(len, tokenized))
    return json_response(
        Embeddings(
            id=f"embd-{request_id}",
            created=created,
            model=body.model,
            data=data,
            usage=EmbeddingUsage(num_tokens, num_tokens),
        )
    )
