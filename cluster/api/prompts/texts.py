"""Prompts of /v1/completions: texts or token ids, one or several.

Owns what a prompt may be.
"""

from typing import Any

from pydantic import JsonValue

from cluster.api.request_builder import check_token_ids
from cluster.errors import InvalidRequest
from cluster.router.config import RouterConfig
from cluster.router.router import Router


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


async def prompt_tokens(
    router: Router, prompts: list[str | list[int]], add_special_tokens: bool
) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt."""
    tokenized = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenized.append(await router.encode(prompt, add_special_tokens))
        else:
            tokenized.append(tuple(prompt))
        if not tokenized[-1]:
            raise InvalidRequest("prompt: it has no tokens", "prompt")
    return tokenized
