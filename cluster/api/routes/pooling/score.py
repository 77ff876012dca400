"""POST /v1/score and /v1/rerank: how well texts go together, in pairs or by the order of documents.

A model or an adapter with a head of one label reads both texts as one prompt (a cross-encoder);
without a head, each text is embedded, and their cosine is the score (a bi-encoder).
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import APIRouter
from pydantic import JsonValue
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.api.auth import Authenticator
from cluster.api.http import extra_parameters_of, json_response, read_body, unless_disconnected
from cluster.api.middleware.rate_limits import let_in
from cluster.api.openapi.operation import GENERATION, Operation, declared
from cluster.api.pooling import (
    MAX_INPUTS,
    PoolingCall,
    activated,
    class_logits,
    classifier_of,
    cut_to_fit,
    pooled,
    pooling_call,
)
from cluster.api.schemas.pooling import (
    PoolingBody,
    PoolingUsage,
    RankedDocument,
    RankedResult,
    Ranking,
    RerankBody,
    Score,
    ScoreBody,
    Scores,
)
from cluster.errors import InvalidRequest
from cluster.router.router import Router
from worker.classifier_config import ClassifierConfig

SCORE = Operation(
    tag="inference",
    summary="Scores pairs of texts.",
    right="model",
    body=ScoreBody,
    answer=Scores,
    errors=GENERATION,
    example={"model": "smollm2", "text_1": "Latvia's capital", "text_2": ["Riga", "Tallinn"]},
)
RERANK = Operation(
    tag="inference",
    summary="Orders documents by how well they go with a query.",
    right="model",
    body=RerankBody,
    answer=Ranking,
    errors=GENERATION,
    example={"model": "smollm2", "query": "Latvia's capital", "documents": ["Riga", "Tallinn"]},
)
_NAMES = (  # of what is scored against what, the first that are given
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
MAX_CHARACTERS = 2**24  # of all pairs: a text counts in each that it is in
_SMALLEST_NORM = 1e-8  # of a vector that has a direction


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """The scores of a call's pairs, in their order, and the tokens that were read for them."""

    scores: list[float]
    num_tokens: int


def score_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes that score texts."""
    routes = APIRouter()
    max_bytes = router.config.max_body_bytes

    async def score(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        await let_in(http, router, principal)
        body = await read_body(http, ScoreBody, max_bytes)
        body.refuse_extras(extras=extra_parameters_of(http))
        first, second = _pairs(body)

        async def respond() -> Response:
            call = await pooling_call(http, router, principal, body)
            return _score_response(call, await _scored(router, call, first, second))

        return await unless_disconnected(http, respond())

    async def rerank(http: HttpRequest) -> Response:
        principal = keys.authenticate(http)
        await let_in(http, router, principal)
        body = await read_body(http, RerankBody, max_bytes)
        body.refuse_extras(extras=extra_parameters_of(http))
        query, documents = _texts(body.query, "query"), _documents(body.documents)

        async def respond() -> Response:
            call = await pooling_call(http, router, principal, body)
            scored = await _scored(router, call, query * len(documents), documents)
            return _rerank_response(call, body, documents, scored)

        return await unless_disconnected(http, respond())

    for name, path in (("score", "/v1/score"), ("score_unversioned", "/score")):
        routes.post(path, name=name, openapi_extra=declared(SCORE))(score)
    for name, path in (
        ("rerank", "/v1/rerank"),
        ("rerank_v2", "/v2/rerank"),
        ("rerank_unversioned", "/rerank"),
    ):
        routes.post(path, name=name, openapi_extra=declared(RERANK))(rerank)
    return routes


def _pairs(body: ScoreBody) -> tuple[list[str], list[str]]:
    """Return the first and the second text of each pair."""
    given = {name for names in _NAMES for name in names if getattr(body, name) is not None}
    for one, other in _NAMES:
        if given == {one, other}:
            first, second = (_texts(getattr(body, name), name) for name in (one, other))
            if len(first) == 1:
                first *= len(second)
            if len(first) != len(second):
                raise InvalidRequest(
                    f"{one}: one text or as many as {other} has, {len(second)}, not {len(first)}",
                    one,
                )
            return first, second
    raise InvalidRequest(
        "text_1: it and text_2 must be given, or instead of both queries and documents, queries "
        "and items, or data_1 and data_2",
        "text_1",
    )


def _texts(value: JsonValue, param: str) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise InvalidRequest(f"{param}: must be a string or a list of strings", param)
    if not 1 <= len(items) <= MAX_INPUTS:
        raise InvalidRequest(
            f"{param}: 1 to {MAX_INPUTS} texts in one call, not {len(items)}", param
        )
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        raise InvalidRequest(f"{param}: must be a string or a list of strings", param)
    if "" in texts:
        raise InvalidRequest(f"{param}: must not be empty", param)
    return texts


def _documents(value: JsonValue) -> list[str]:
    """Return documents, which may be objects with a text."""
    if isinstance(value, list):
        value = [
            one["text"] if isinstance(one, dict) and set(one) == {"text"} else one for one in value
        ]
    return _texts(value, "documents")


async def _scored(
    router: Router, call: PoolingCall, first: Sequence[str], second: Sequence[str]
) -> ScoredPairs:
    classifier = classifier_of(router, call.model)
    if classifier is not None:
        return await _read_together(router, call, classifier, first, second)
    if router.pooling.refusal:
        raise InvalidRequest(
            f"model: it has no classification head to score by, and no embeddings: "
            f"{router.pooling.refusal}",
            "model",
        )
    return await _embedded_apart(router, call, first, second)


async def _read_together(
    router: Router,
    call: PoolingCall,
    classifier: ClassifierConfig,
    first: Sequence[str],
    second: Sequence[str],
) -> ScoredPairs:
    if classifier.num_labels != 1:
        raise InvalidRequest(
            f"model: {call.body.model[:256]!r} has a head of {classifier.num_labels} labels, and "
            "a score is that of a single one; use /v1/classify",
            "model",
        )
    num_characters = sum(map(len, first)) + sum(map(len, second))
    if num_characters > MAX_CHARACTERS:
        raise InvalidRequest(
            f"the pairs have {num_characters} characters, over the limit of {MAX_CHARACTERS}; a "
            "text counts in each pair that it is in"
        )
    tokenized = []
    for one, other in zip(first, second, strict=True):
        tokenized.append(await _pair_tokens(router, call.body, one, other))
        await asyncio.sleep(0)  # thousands of short ones would halt every stream
    tokenized = cut_to_fit(router, call.body, tokenized)
    activation = classifier.score_activation
    if call.body.use_activation is False:
        activation = "identity"
    logits = await class_logits(router, call, tokenized)
    scores = [float(activated(one, activation)[0]) for one in logits]
    return ScoredPairs(scores, sum(map(len, tokenized)))


async def _pair_tokens(router: Router, body: PoolingBody, one: str, other: str) -> tuple[int, ...]:
    """Return a pair as the model's template for scores or else its tokenizer puts it together."""
    adds = body.add_special_tokens is not False
    template = router.tokenizer.score_template
    if template is None:
        return await router.encode(one, adds, other)
    turns = [{"role": "query", "content": one}, {"role": "document", "content": other}]
    text = router.tokenizer.render(turns, False, False, {}, chat_template=template)
    return await router.encode(text, adds)


async def _embedded_apart(
    router: Router, call: PoolingCall, first: Sequence[str], second: Sequence[str]
) -> ScoredPairs:
    texts = tuple(dict.fromkeys((*first, *second)))  # each once
    tokenized = []
    for text in texts:
        adds = call.body.add_special_tokens is not False
        tokenized.append(await router.encode(text, adds))
        await asyncio.sleep(0)
    tokenized = cut_to_fit(router, call.body, tokenized)
    vectors = [
        np.frombuffer(values, "<f4").astype(np.float64)
        async for some in pooled(router, call, router.pooling.pooling, tokenized)
        for values in some
    ]
    # Sums of numpy's own, whose order depends on nothing but their length.
    unit = {
        text: vector / max(float(np.sqrt(np.sum(vector * vector))), _SMALLEST_NORM)
        for text, vector in zip(texts, vectors, strict=True)
    }
    scores = [
        float(np.sum(unit[one] * unit[other])) for one, other in zip(first, second, strict=True)
    ]
    return ScoredPairs(scores, sum(map(len, tokenized)))


def _score_response(call: PoolingCall, scored: ScoredPairs) -> Response:
    return json_response(
        Scores(
            id=f"score-{call.request_id}",
            created=int(time.time()),
            model=call.body.model,
            data=[Score(index=index, score=score) for index, score in enumerate(scored.scores)],
            usage=PoolingUsage(scored.num_tokens, scored.num_tokens),
        )
    )


def _rerank_response(
    call: PoolingCall, body: RerankBody, documents: Sequence[str], scored: ScoredPairs
) -> Response:
    order = sorted(range(len(documents)), key=lambda index: (-scored.scores[index], index))
    shows = body.return_documents is not False
    results = [
        RankedResult(
            index=index,
            document=RankedDocument(documents[index]) if shows else None,
            relevance_score=scored.scores[index],
        )
        for index in order[: body.top_n or None]
    ]
    usage = PoolingUsage(scored.num_tokens, scored.num_tokens)
    return json_response(
        Ranking(id=f"rerank-{call.request_id}", model=body.model, usage=usage, results=results)
    )
