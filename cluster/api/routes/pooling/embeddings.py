"""POST /v1/embeddings: prompts as vectors.

A prompt goes through the scheduler like any other and ends where its first token would be drawn.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.embedding_format import BYTES, Values, as_json, bytes_response
from cluster.api.http import (
    extra_parameters_of,
    json_response,
    read_body,
    unless_disconnected,
)
from cluster.api.middleware.rate_limits import let_in
from cluster.api.openapi.operation import GENERATION, Operation, declared
from cluster.api.pooling import pooled, pooling_call, prompts_of
from cluster.api.schemas.embeddings import Embedding, EmbeddingBody, Embeddings
from cluster.api.schemas.pooling import PoolingUsage
from cluster.errors import InvalidRequest
from cluster.router.bodies.validation import MAX_VALUES_OF_TOKENS
from cluster.router.pooling_config import PoolingConfig
from cluster.router.router import Router
from cluster.router.tenancy.principal import Principal

MAX_DESCRIBED = 32  # prompts whose vectors a header tells of


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


def shaped(vector: bytes, body: EmbeddingBody, pooling: PoolingConfig) -> Values:
    """Return a vector, [H] float32, cut to [D] and normalised."""
    values = np.frombuffer(vector, dtype="<f4")
    if body.dimensions is not None:
        values = values[: body.dimensions]
    normalize = pooling.normalize
    for wanted in (body.use_activation, body.normalize):
        normalize = normalize if wanted is None else wanted
    if normalize:
        norm = float(np.linalg.norm(values.astype(np.float64)))
        values = (values / max(norm, 1e-12)).astype("<f4")
    return values


def _check_encoding(body: EmbeddingBody) -> None:
    if body.encoding_format in (None, "float") and body.embed_dtype not in (None, "float32"):
        raise InvalidRequest(
            "embed_dtype: numbers in JSON have no type; for encoding_format base64, bytes and "
            "bytes_only",
            "embed_dtype",
        )
    if body.encoding_format == "bytes" and isinstance(body.input, list):
        count = 1 if all(type(one) is int for one in body.input) else len(body.input)
        if count > MAX_DESCRIBED:
            raise InvalidRequest(
                f"encoding_format: at most {MAX_DESCRIBED} prompts in bytes, not {count}: what is "
                "said of each is in a header; bytes_only says nothing",
                "encoding_format",
            )


EMBEDDINGS = Operation(
    tag="inference",
    summary="Makes vectors of prompts.",
    right="model",
    body=EmbeddingBody,
    answer=Embeddings,
    text=BYTES,
    errors=GENERATION,
    example={"model": "smollm2", "input": ["Riga", "Latvia's capital"]},
)


def embedding_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes of embeddings."""
    routes = APIRouter()

    @routes.post("/v1/embeddings", openapi_extra=declared(EMBEDDINGS))
    async def create_embeddings(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        await let_in(http, router, principal)
        body = await read_body(
            http, EmbeddingBody, router.config.max_body_bytes, MAX_VALUES_OF_TOKENS
        )
        _check_encoding(body)
        body.refuse_extras(extras=extra_parameters_of(http))
        if router.pooling.refusal:
            raise InvalidRequest(f"this model has no embeddings: {router.pooling.refusal}", "model")
        check_dimensions(body.dimensions, router.pooling)
        return await unless_disconnected(http, _create(http, router, principal, body))

    return routes


async def _create(
    http: HttpRequest, router: Router, principal: Principal, body: EmbeddingBody
) -> Response:
    call = await pooling_call(http, router, principal, body)
    tokenized = await prompts_of(router, body)
    num_tokens = sum(map(len, tokenized))
    reply = Embeddings(
        id=f"embd-{call.request_id}",
        created=int(time.time()),
        model=body.model,
        data=[],
        usage=PoolingUsage(num_tokens, num_tokens),
    )
    vectors: list[Values] = []

    def add(some: Sequence[bytes]) -> None:
        vectors.extend(shaped(vector, body, router.pooling) for vector in some)

    async for some in pooled(router, call, router.pooling.pooling, tokenized):
        await asyncio.to_thread(add, some)
    # A million numbers as text take a second, which the streams have not.
    return await asyncio.to_thread(_response, body, reply, vectors)


def _response(body: EmbeddingBody, reply: Embeddings, vectors: Sequence[Values]) -> Response:
    """Return vectors as they were asked for; `reply` has none yet."""
    dtype, endianness = body.embed_dtype or "float32", body.endianness or "native"
    encoding = body.encoding_format or "float"
    if encoding in ("bytes", "bytes_only"):
        said = {name: getattr(reply, name) for name in ("id", "created", "model", "usage")}
        metadata = said if encoding == "bytes" else None
        return bytes_response(vectors, dtype, endianness, metadata)
    for index, values in enumerate(vectors):
        coded = as_json(values, encoding, dtype, endianness)
        reply.data.append(Embedding(index=index, embedding=coded))
    return json_response(reply)
