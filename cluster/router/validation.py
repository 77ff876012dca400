"""From a checked body to what a scheduler takes: cross-field rules, limits and defaults.

Owns every rule that needs more than one field, the tokenizer or the model's sizes. Single-value
ranges are in `schemas`. Knows nothing of HTTP or of schedulers.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from cluster.errors import InvalidRequest
from cluster.router.config import RouterConfig
from cluster.router.schemas import ChatBody, GenerationBody, Message
from worker.protocol import SamplingParams

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions; a chat may fill the context


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become the text that is shown."""

    stops: tuple[str, ...]
    include_stop: bool  # a stop string, or a stop token's text, belongs to the answer
    skip_special_tokens: bool
    min_tokens: int  # stop strings count only after so many tokens


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
    check_token_ids(given, config, "stop_token_ids")
    return tuple(sorted({*given, *(() if body.ignore_eos else config.eos_token_ids)}))


def check_token_ids(token_ids: Sequence[int], config: RouterConfig, param: str) -> None:
    """Raise InvalidRequest unless all tokens are in the vocabulary."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < config.vocab_size:
            raise InvalidRequest(
                f"{param}: token {token_id} is not in the vocabulary of {config.vocab_size}", param
            )


def sampling_params(
    body: GenerationBody, num_logprobs: int | None, stops: tuple[int, ...], config: RouterConfig
) -> SamplingParams:
    """Return how tokens are drawn; without a seed, one is drawn here, so that the core has none."""
    min_tokens = body.min_tokens or 0
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_or(body.min_p, 0.0),
        seed=seed,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
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
    by_token: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
        assert math.isfinite(value), "the schema lets only finite numbers in"
        by_token[int(key)] = float(value)
    check_token_ids(list(by_token), config, "logit_bias")
    return tuple(sorted(by_token.items()))


def answer_length(
    num_prompt_tokens: int, wanted: int | None, default: int | None, config: RouterConfig
) -> int:
    """Return max_tokens: as wanted, else the default, else what the context leaves.

    Raises:
        InvalidRequest: if prompt and answer do not fit the context, with the numbers.
    """
    room = config.context_length - num_prompt_tokens
    if room < 1:
        raise InvalidRequest(
            f"this model's context length is {config.context_length} tokens, but the prompt alone "
            f"has {num_prompt_tokens}; at least one must be left for the answer",
            "prompt",
            "context_length_exceeded",
        )
    if wanted is None:
        return room if default is None else min(room, default)
    if wanted > room:
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


def check_stream_options(body: GenerationBody) -> None:
    """Raise InvalidRequest for options of a stream that is none, or that are not supported."""
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequest("stream_options: only allowed with stream=true", "stream_options")
    for name, value in sorted((body.stream_options.model_extra or {}).items()):
        if value not in (None, False):
            place = f"stream_options.{name[:100]}"
            raise InvalidRequest(f"{place} is not supported", place, "unsupported_parameter")


def prompts(value: JsonValue, config: RouterConfig) -> list[str | list[int]]:
    """Return the prompts of a body of /v1/completions: texts or lists of token ids.

    Raises:
        InvalidRequest: unless it is a string, a list of token ids, or a list of such.
    """
    wrong = InvalidRequest(
        "prompt: must be a string, a list of strings, a list of token ids or a list of such lists",
        "prompt",
    )
    items: Any = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not isinstance(items, list):
        raise wrong
    if not 1 <= len(items) <= config.max_prompts:
        raise InvalidRequest(
            f"prompt: 1 to {config.max_prompts} prompts in one call, not {len(items)}", "prompt"
        )
    for item in items:
        if not (isinstance(item, str) or _are_tokens(item)):
            raise wrong
        if not item:
            raise InvalidRequest("prompt: must not be empty", "prompt")
        if isinstance(item, list):
            check_token_ids(item, config, "prompt")
    return items


def _are_tokens(value: JsonValue) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def conversation(messages: list[Message]) -> list[dict[str, str]]:
    """Return the turns as a chat template takes them, their parts of text joined by newlines."""
    turns = []
    for number, message in enumerate(messages):
        place = f"messages.{number}."
        for name, value in sorted((message.model_extra or {}).items()):
            if value is not None and value != []:
                raise InvalidRequest(
                    f"{place}{name[:100]} is not supported",
                    place + name[:100],
                    "unsupported_parameter",
                )
        turn = {"role": message.role, "content": _content(message.content, place + "content")}
        if message.name is not None:
            turn["name"] = message.name
        turns.append(turn)
    return turns


def _content(value: JsonValue, place: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{place}: must be a string or a list of text parts", place)
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{place}: only parts of type text are supported", place)
        texts.append(text)
    return "\n".join(texts)


def chat_logprobs(body: ChatBody) -> int | None:
    """Return how many alternatives are wanted for each token; None for no log-probabilities."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs=true", "top_logprobs")
    return None
