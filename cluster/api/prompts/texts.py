"""Prompts of /v1/completions: texts or token ids, one or several.

Owns what a prompt may be.
"""

import asyncio
from typing import Any

from pydantic import JsonValue

from cluster.api.request_builder import GenerationLimits
from cluster.api.restrictions import check_token_ids
from cluster.api.schemas.requests import TextBody, TruncationSide
from cluster.errors import InvalidRequest
from cluster.router.config import RouterConfig
from cluster.router.router import Router


def prompts(
    value: JsonValue, config: RouterConfig, param: str = "prompt", max_prompts: int | None = None
) -> list[str | list[int]]:
    """Return the prompts of a body: texts or lists of token ids, at most `max_prompts`.

    Raises:
        InvalidRequest: unless it is a string, a list of token ids, or a list of such.
    """
    wrong = InvalidRequest(
        f"{param}: must be a string, a list of strings, a list of token ids or a list of such "
        "lists",
        param,
    )
    items: Any = [value] if isinstance(value, str) or _are_tokens(value) else value
    if not isinstance(items, list):
        raise wrong
    limit = config.max_prompts if max_prompts is None else max_prompts
    if not 1 <= len(items) <= limit:
        raise InvalidRequest(f"{param}: 1 to {limit} prompts in one call, not {len(items)}", param)
    for item in items:
        if not (isinstance(item, str) or _are_tokens(item)):
            raise wrong
        if not item:
            raise InvalidRequest(f"{param}: must not be empty", param)
        if isinstance(item, list):
            check_token_ids(item, config, param)
    return items


def _are_tokens(value: JsonValue) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def truncated(
    prompt: tuple[int, ...], body: TextBody, limits: GenerationLimits, config: RouterConfig
) -> tuple[int, ...]:
    """Return the last tokens of a prompt, or the first, as many as a body wants; -1: what fits.

    Raises:
        InvalidRequest: if none would be left.
    """
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return prompt
    if wanted == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens: 0 leaves no prompt; -1 leaves what fits the context",
            "truncate_prompt_tokens",
        )
    if wanted == -1:
        answer = limits.max_tokens or limits.default_max_tokens or 1
        wanted = max(1, config.context_length - answer)
    return cut(prompt, wanted, body.truncation_side)


def cut(prompt: tuple[int, ...], wanted: int, side: TruncationSide | None) -> tuple[int, ...]:
    """Return at most so many tokens of a prompt; what is over is cut off its left or right."""
    return prompt[:wanted] if side == "right" else prompt[-wanted:]


async def prompt_tokens(
    router: Router, prompts: list[str | list[int]], add_special_tokens: bool
) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt."""
    tokenized = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenized.append(await router.encode(prompt, add_special_tokens))
            await asyncio.sleep(0)  # thousands of short ones would halt every stream
        else:
            tokenized.append(tuple(prompt))
        if not tokenized[-1]:
            raise InvalidRequest("prompt: it has no tokens", "prompt")
    return tokenized
