"""Calls whose prompts are pooled: from tokens to requests, and to what each prompt has become.

A prompt goes through the scheduler like any other and ends where its first token would be drawn.
The ranks send numbers as they are: what is applied to them is the caller's choice.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from starlette.requests import Request as HttpRequest

from cluster.api.http import arrival_of, request_id_of
from cluster.api.middleware.rate_limits import admission_of
from cluster.api.prompts.conversation import conversation_tokens
from cluster.api.prompts.texts import cut, prompt_tokens, prompts
from cluster.api.schemas.pooling import PoolingBody, PromptBody
from cluster.api.schemas.requests import ConversationBody
from cluster.errors import InvalidRequest
from cluster.request import Request
from cluster.router.model_resolver import ResolvedModel
from cluster.router.output_processor import TextOptions
from cluster.router.router import Router
from cluster.router.tenancy.admission import Admission
from cluster.router.tenancy.principal import Principal
from worker.classifier_config import Activation, ClassifierConfig
from worker.protocol import Pooling, SamplingParams

MAX_INPUTS = 2048  # OpenAI's, of embeddings
WAVE = 64  # prompts of one call that the schedulers have at once
_NO_TEXT = TextOptions((), include_stop=False, skip_special_tokens=True, min_tokens=0)

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """One call: who asks, for what, of which model, and when it came."""

    principal: Principal
    body: PoolingBody
    request_id: str
    arrival: float  # seconds of `time.monotonic`
    model: ResolvedModel
    admission: Admission | None  # None: nothing is counted


async def pooling_call(
    http: HttpRequest, router: Router, principal: Principal, body: PoolingBody
) -> PoolingCall:
    """Return a call with what its names stand for; raises as ModelResolver.resolve."""
    request_id = body.request_id or request_id_of(http)
    parts = None if body.lora is None else tuple((one.name, one.weight) for one in body.lora)
    model = await router.models.resolve(body.model, parts, principal, request_id)
    return PoolingCall(principal, body, request_id, arrival_of(http), model, admission_of(http))


async def prompts_of(router: Router, body: PromptBody) -> list[tuple[int, ...]]:
    """Return the tokens of all prompts of a body, each cut to what is asked for.

    Raises:
        InvalidRequest: unless it has prompts, or a conversation, that fit.
    """
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("input: either it or messages must be given", "input")
    if body.messages is None:
        given = await router.apart(
            body.input, prompts, body.input, router.config, "input", MAX_INPUTS
        )
        tokenized = await prompt_tokens(router, given, body.add_special_tokens is not False)
        return cut_to_fit(router, body, tokenized)
    conversation = ConversationBody(
        messages=body.messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
        chat_template=body.chat_template,
    )
    token_ids = await conversation_tokens(router, conversation, bool(body.add_special_tokens))
    return cut_to_fit(router, body, [token_ids])


def cut_to_fit(
    router: Router, body: PoolingBody, tokenized: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return the tokens of all prompts, each cut to what is asked for.

    Raises:
        InvalidRequest: if one is too long.
    """
    limit, longest = body.truncate_prompt_tokens, router.config.context_length
    if limit is not None:
        if limit == 0:
            raise InvalidRequest("truncate_prompt_tokens: 0 leaves nothing", "input")
        if limit > longest:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {limit} is over {longest}, this model's context length; "
                "-1 is what fits",
                "truncate_prompt_tokens",
            )
        limit = longest if limit < 0 else limit
        tokenized = [cut(token_ids, limit, body.truncation_side) for token_ids in tokenized]
    num_tokens = max(map(len, tokenized), default=0)
    if num_tokens > longest:  # no token is drawn, so the prompt may fill it
        raise InvalidRequest(
            f"this model's context length is {longest} tokens, but a prompt has {num_tokens}",
            "prompt",
            "context_length_exceeded",
        )
    return list(tokenized)


async def pooled(
    router: Router, call: PoolingCall, pooling: Pooling, tokenized: Sequence[tuple[int, ...]]
) -> AsyncIterator[list[bytes]]:
    """Yield what prompts have become, in their order and some at a time."""
    sampling = SamplingParams(temperature=0.0, pooling=pooling)
    priority = call.principal.priority(call.body.priority)
    requests = [
        Request(
            request_id=router.unique_id(call.request_id),
            adapter=call.model.adapter,
            token_ids=token_ids,
            sampling=sampling,
            max_tokens=1,  # where it ends
            cache_salt=call.principal.cache_salt(call.body.cache_salt),
            priority=priority,
            tenant=call.principal.tenant,
            weight=call.principal.weight,
            adapter_bytes=call.model.adapter_bytes,
        )
        for token_ids in tokenized
    ]
    call.principal.check_prompt(max(map(len, tokenized), default=0), "input")
    admission, num_at_once = call.admission, WAVE
    if admission is not None:
        num_at_once = admission.num_at_once(WAVE)
        at_once = min(num_at_once, len(requests))
        await admission.reserve([(one,) for one in requests], is_bounded=True, at_once=at_once)
    for start in range(0, len(requests), num_at_once):
        wave = requests[start : start + num_at_once]
        generation = router.generate(call.model, [(one,) for one in wave], _NO_TEXT, call.arrival)
        with generation:
            while generation.is_running:
                await generation.receive()
        if admission is not None:
            admission.num_used += sum(len(one.token_ids) for one in wave)
        yield [processor.pooled for processor in generation.processors]


def classifier_of(router: Router, model: ResolvedModel) -> ClassifierConfig | None:
    """Return what the head of a model says, an adapter's own or else the base model's."""
    return model.classifier or router.config.classifier


async def class_logits(
    router: Router, call: PoolingCall, tokenized: Sequence[tuple[int, ...]]
) -> list[Logits]:
    """Return the logits [labels] of a classification head behind each prompt."""
    pad = router.config.pad_token_id
    prompts = [_unpadded(token_ids, pad) for token_ids in tokenized]
    return [
        np.frombuffer(values, "<f4")
        async for some in pooled(router, call, "classify", prompts)
        for values in some
    ]


def _unpadded(token_ids: tuple[int, ...], pad: int | None) -> tuple[int, ...]:
    """Return a prompt up to its last token that is no padding: the one that transformers takes.

    What follows has no part in that token's state.
    """
    end = len(token_ids)
    while end > 1 and token_ids[end - 1] == pad:
        end -= 1
    return token_ids[:end]


def activated(logits: Logits, activation: Activation) -> npt.NDArray[np.float64]:
    """Return logits [labels] with an activation applied."""
    values = logits.astype(np.float64)
    match activation:
        case "sigmoid":
            # The exponent of no number above 0 is taken, which could be too large.
            exponents = np.exp(-np.abs(values))
            return np.where(values >= 0, 1.0, exponents) / (1.0 + exponents)
        case "softmax":
            exponents = np.exp(values - values.max())
            return np.asarray(exponents / exponents.sum())
    return values
