"""From a checked body to the requests that a scheduler takes: cross-field rules and defaults.

Owns every rule that needs more than one field, the tokenizer's vocabulary or the model's sizes.
Ranges of single values are in `schemas.requests`.
"""

import math
import secrets
from dataclasses import dataclass

import msgspec
from pydantic import JsonValue
from starlette.requests import Request as HttpRequest

from cluster.api.http import arrival_of, extra_parameters_of, request_id_of
from cluster.api.prompt_logprobs import scored
from cluster.api.restrictions import check_token_ids, naming, restricted
from cluster.api.schemas.extras import ExtraParameters
from cluster.api.schemas.requests import CompletionBody, GenerationBody, TextBody
from cluster.api.structured_output import grammar_of
from cluster.errors import InvalidRequest
from cluster.request import Request
from cluster.router.config import RouterConfig
from cluster.router.model_resolver import ResolvedModel
from cluster.router.output_processor import TextOptions
from cluster.router.router import Router
from cluster.router.tenancy.principal import Principal
from cluster.router.tracing.call_trace import current_trace, phase
from cluster.tenancy.limits import least
from worker.protocol import SamplingParams

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters


@dataclass(frozen=True, slots=True)
class Call:
    """One call for text: who asks, for what, when it came, and how the answer is to be shown."""

    principal: Principal
    body: GenerationBody
    request_id: str
    arrival: float  # seconds of `time.monotonic`
    text_options: TextOptions
    grammar: str  # of the answer; "": any text
    grammar_param: str  # that asks for it


def call_of(http: HttpRequest, principal: Principal, body: GenerationBody) -> Call:
    """Return a call with its body checked as far as one can without the model and the prompt.

    Raises:
        InvalidRequest: for unknown, unsupported and clashing fields.
    """
    extras = extra_parameters_of(http)
    body.refuse_extras(extras=extras)
    check_stream_options(body, extras)
    if None not in (body.request_id, body.rid) and body.request_id != body.rid:
        raise InvalidRequest(f"rid: {body.rid!r} is not the request_id, {body.request_id!r}", "rid")
    # Before the header, which proxies set on their own.
    request_id = body.request_id or body.rid or request_id_of(http)
    grammar, param = grammar_of(body)
    trace = current_trace()
    if trace is not None:
        trace.requested(body)
    return Call(principal, body, request_id, arrival_of(http), text_options(body), grammar, param)


async def check_grammar(router: Router, call: Call) -> None:
    """Raise InvalidRequest if the form that a call asks for cannot be followed."""
    if call.grammar:
        with phase("check_grammar"):
            await router.grammars.check(call.grammar, call.grammar_param)


async def resolve_model(router: Router, call: Call) -> ResolvedModel:
    """Return what the names in a body stand for.

    Raises:
        InvalidRequest: if that is a classifier; otherwise as ModelResolver.resolve.
    """
    lora = call.body.lora
    parts = None if lora is None else tuple((entry.name, entry.weight) for entry in lora)
    model = await router.models.resolve(call.body.model, parts, call.principal, call.request_id)
    if router.config.classifier is not None:
        raise InvalidRequest(
            f"model: {router.config.model_name!r} has a classification head and no lm_head, so "
            "it generates nothing; use /v1/classify or /v1/score",
            "model",
        )
    if model.classifier is not None:
        raise InvalidRequest(
            f"model: the adapter {model.names[0]!r} was trained with a classification head, not "
            "to generate; use /v1/classify or /v1/score",
            "model",
        )
    return model


@dataclass(frozen=True, slots=True)
class Choices:
    """How many answers each prompt of a call gets."""

    n: int  # shown
    best_of: int  # generated; the best n are shown

    @property
    def are_ranked(self) -> bool:
        """Whether answers must be compared, for which their log-probabilities are needed."""
        return self.best_of > self.n


def choices_of(body: GenerationBody, num_prompts: int, config: RouterConfig) -> Choices:
    """Return how many answers a body asks for.

    Raises:
        InvalidRequest: if they are too many, fewer than are to be shown, or to be ranked in a
            stream.
    """
    n = 1 if body.n is None else body.n
    wanted = body.best_of if isinstance(body, CompletionBody) else None
    best_of = n if wanted is None else wanted
    for name, count in (("n", n), ("best_of", best_of)):
        if count > config.max_choices:
            raise InvalidRequest(f"{name}: at most {config.max_choices}, not {count}", name)
    if best_of < n:
        raise InvalidRequest(f"best_of: {best_of} is less than n, {n}", "best_of")
    if best_of > n and body.stream:
        raise InvalidRequest(
            f"best_of: the best {n} of {best_of} are known only at the end, so they cannot be "
            "streamed",
            "best_of",
        )
    name = "n" if wanted is None else "best_of"
    if num_prompts * best_of > config.max_answers:
        raise InvalidRequest(
            f"{name}: {num_prompts} prompts with {best_of} answers each are over the limit of "
            f"{config.max_answers} answers in one call",
            name,
        )
    return Choices(n, best_of)


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    """What chat and text completions spell differently in their bodies."""

    max_tokens: int | None
    default_max_tokens: int | None  # None: the server's, or what the context leaves
    num_logprobs: int | None  # shown; None: no log-probabilities
    choices: Choices
    num_prompt_logprobs: int | None = None  # computed; None: none


def build_requests(
    router: Router,
    call: Call,
    model: ResolvedModel,
    prompts: list[tuple[int, ...]],
    limits: GenerationLimits,
) -> list[tuple[Request, ...]]:
    """Return for each prompt the requests of its choices.

    Raises:
        InvalidRequest: if tokens are not in the vocabulary or the context is too short.
        Forbidden: if the caller may not have the priority.
    """
    principal, body, config = call.principal, call.body, router.config
    priority = principal.priority(body.priority)
    stops = stop_tokens(body, config)
    num_logprobs = limits.num_logprobs
    if num_logprobs is None and limits.choices.are_ranked:
        num_logprobs = 0
    sampling = sampling_params(body, num_logprobs, stops, config)
    if body.bad_words or body.allowed_token_ids is not None:
        sampling = restricted(sampling, body, router.tokenizer, config, call.grammar_param)
    if isinstance(body, TextBody) and body.logprob_token_ids:
        if limits.num_logprobs is None:
            raise InvalidRequest("logprob_token_ids: needs logprobs", "logprob_token_ids")
        sampling = naming(sampling, body.logprob_token_ids, config)
    if call.grammar:
        sampling = msgspec.structs.replace(sampling, grammar=call.grammar)
    samplings = seeded(sampling, limits.choices.best_of)
    default = limits.default_max_tokens or config.sampling_defaults.max_tokens
    most = principal.max_output_tokens
    if most is not None and (limits.max_tokens or 0) > most:
        raise InvalidRequest(
            f"max_tokens: {limits.max_tokens} is over the longest answer of this key, {most}",
            "max_tokens",
        )
    default = least(default, most)
    requests = []
    for token_ids in prompts:
        principal.check_prompt(len(token_ids))
        max_tokens = max_tokens_of(len(token_ids), limits.max_tokens, default, config)
        check_lengths(body, max_tokens)
        choices = tuple(
            Request(
                request_id=router.unique_id(call.request_id),
                adapter=model.adapter,
                token_ids=token_ids,
                sampling=sampling,
                max_tokens=max_tokens,
                stop_token_ids=stops,
                cache_salt=principal.cache_salt(body.cache_salt),
                priority=priority,
                tenant=principal.tenant,
                weight=principal.weight,
                adapter_bytes=model.adapter_bytes,
            )
            for sampling in samplings
        )
        if limits.num_prompt_logprobs is not None:
            choices = scored(choices, limits.num_prompt_logprobs)
        requests.append(choices)
    return requests


def seeded(sampling: SamplingParams, num_choices: int) -> tuple[SamplingParams, ...]:
    """Return how each choice of a prompt is drawn.

    Choice i of seed s draws what a single request with seed (s + i) modulo 2**64 would.
    """
    return tuple(
        msgspec.structs.replace(sampling, seed=(sampling.seed + number) % 2**64)
        for number in range(num_choices)
    )


def stop_strings(value: JsonValue) -> tuple[str, ...]:
    """Return the stop strings of a body.

    Raises:
        InvalidRequest: unless it is null, a string or a list of strings within the limits.
    """
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list):
        raise InvalidRequest("stop: must be a string or a list of strings", "stop")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: at most {MAX_STOPS} strings, not {len(stops)}", "stop")
    checked = []
    for stop in stops:
        if not isinstance(stop, str):
            raise InvalidRequest("stop: must be a string or a list of strings", "stop")
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"stop: each string must have 1 to {MAX_STOP_LENGTH} characters", "stop"
            )
        checked.append(stop)
    return tuple(checked)


def text_options(body: GenerationBody) -> TextOptions:
    """Return how the answer to this body is to be shown."""
    return TextOptions(
        stops=stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )


def stop_tokens(body: GenerationBody, config: RouterConfig) -> tuple[int, ...]:
    """Return the tokens that end the answer, in ascending order."""
    given = body.stop_token_ids or []
    if given:
        check_token_ids(given, config, "stop_token_ids")
    return tuple(sorted({*given, *(() if body.ignore_eos else config.eos_token_ids)}))


def sampling_params(
    body: GenerationBody, num_logprobs: int | None, stops: tuple[int, ...], config: RouterConfig
) -> SamplingParams:
    """Return how tokens are drawn; without a seed, one is drawn here, so that the core has none."""
    min_tokens = body.min_tokens or 0
    defaults = config.sampling_defaults
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    return SamplingParams(
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        min_p=_or(body.min_p, defaults.min_p),
        seed=seed,
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_logit_bias(body.logit_bias or {}, config),
        min_tokens=min_tokens,
        held_back=stops if min_tokens else (),
        num_logprobs=num_logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logit_bias(bias: dict[str, float], config: RouterConfig) -> tuple[tuple[int, float], ...]:
    wrong = [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        some = ", ".join(repr(key[:40]) for key in wrong[:8])
        is_what = "is not a token id" if len(wrong) == 1 else "are no token ids"
        raise InvalidRequest(f"logit_bias: {some} {is_what}", "logit_bias")
    by_token: dict[int, float] = {}
    for key, value in bias.items():
        assert math.isfinite(value), "the schema lets only finite numbers in"
        by_token[int(key)] = float(value)
    if by_token:
        check_token_ids(list(by_token), config, "logit_bias")
    return tuple(sorted(by_token.items()))


def max_tokens_of(
    num_prompt_tokens: int, wanted: int | None, default: int | None, config: RouterConfig
) -> int:
    """Return max_tokens: as wanted, else the default, else what the context leaves.

    Raises:
        InvalidRequest: if prompt and answer do not fit the context, with the numbers.
    """
    space = config.context_length - num_prompt_tokens
    if space < 1:
        raise InvalidRequest(
            f"this model's context length is {config.context_length} tokens, but the prompt alone "
            f"has {num_prompt_tokens}; at least one must be left for the answer",
            "prompt",
            "context_length_exceeded",
        )
    if wanted is None:
        return space if default is None else min(space, default)
    if wanted > space:
        raise InvalidRequest(
            f"this model's context length is {config.context_length} tokens, but "
            f"{num_prompt_tokens + wanted} were asked for: {num_prompt_tokens} in the prompt and "
            f"{wanted} in the answer",
            "max_tokens",
            "context_length_exceeded",
        )
    return wanted


def check_lengths(body: GenerationBody, max_tokens: int) -> None:
    """Raise InvalidRequest if the least length of the answer is over its greatest."""
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {body.min_tokens} is over max_tokens, {max_tokens}", "min_tokens"
        )


def check_stream_options(body: GenerationBody, extras: ExtraParameters) -> None:
    """Raise InvalidRequest for options of a stream that is none, or that are not supported."""
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequest("stream_options: only allowed with stream=true", "stream_options")
    for name, value in sorted((body.stream_options.model_extra or {}).items()):
        param = f"stream_options.{name[:100]}"
        if value not in (None, False) and not extras.ignores(param):
            raise InvalidRequest(f"{param} is not supported", param, "unsupported_parameter")
