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

from cluster.api.auth import KeyRing
from cluster.api.embedding_format import BYTES, Values, as_json, bytes_response
from cluster.api.http import (
    arrival_of,
    extra_parameters_of,
    json_response,
    read_body,
    request_id_of,
    unless_disconnected,
)
from cluster.api.openapi.operation import GENERATION, Operation, declared
from cluster.api.prompts.conversation import conversation_tokens
from cluster.api.prompts.texts import cut, prompt_tokens, prompts
from cluster.api.request_builder import max_tokens_of
from cluster.api.schemas.embeddings import Embedding, EmbeddingBody, Embeddings, EmbeddingUsage
from cluster.api.schemas.requests import ConversationBody
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
MAX_DESCRIBED = 32  # prompts whose vectors a header tells of
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


async def _tokens(router: Router, body: EmbeddingBody) -> list[tuple[int, ...]]:
    """Return the tokens of all inputs, each cut to what is asked for."""
    tokenized = await _whole_tokens(router, body)
    limit = body.truncate_prompt_tokens
    if limit is not None:
        if limit == 0:
            raise InvalidRequest("truncate_prompt_tokens: 0 leaves nothing", "input")
        longest = router.config.context_length - 1
        if limit > longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {limit} is over {longest}, the longest prompt that fits "
                "the context; -1 is what fits",
                "truncate_prompt_tokens",
            )
        limit = longest if limit < 0 else limit
        tokenized = [cut(token_ids, limit, body.truncation_side) for token_ids in tokenized]
    for token_ids in tokenized:
        max_tokens_of(len(token_ids), 1, None, router.config)
    return tokenized


async def _whole_tokens(router: Router, body: EmbeddingBody) -> list[tuple[int, ...]]:
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("input: either it or messages must be given", "input")
    if body.messages is None:
        given = prompts(body.input, router.config, "input", MAX_INPUTS)
        return await prompt_tokens(router, given, body.add_special_tokens is not False)
    conversation = ConversationBody(
        messages=body.messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        chat_template=body.chat_template,
    )
    return [await conversation_tokens(router, conversation, bool(body.add_special_tokens))]


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


def embedding_routes(router: Router, keys: KeyRing) -> APIRouter:
    """Return the routes of embeddings."""
    routes = APIRouter()

    @routes.post("/v1/embeddings", openapi_extra=declared(EMBEDDINGS))
    async def create_embeddings(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        body = await read_body(http, EmbeddingBody, router.config.max_body_bytes, MAX_VALUES)
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
    request_id = body.request_id or request_id_of(http)
    parts = None if body.lora is None else tuple((one.name, one.weight) for one in body.lora)
    model = await router.models.resolve(body.model, parts, principal, request_id)
    tokenized = await _tokens(router, body)
    requests = _requests(router, principal, request_id, body, model, tokenized)
    num_tokens = sum(map(len, tokenized))
    reply = Embeddings(
        id=f"embd-{request_id}",
        created=int(time.time()),
        model=body.model,
        data=[],
        usage=EmbeddingUsage(num_tokens, num_tokens),
    )
    vectors: list[Values] = []

    def add(pooled: Sequence[bytes]) -> None:
        vectors.extend(shaped(vector, body, router.pooling) for vector in pooled)

    for start in range(0, len(requests), WAVE):
        wave = requests[start : start + WAVE]
        await asyncio.to_thread(add, await _vectors(router, model, wave, arrival_of(http)))
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
