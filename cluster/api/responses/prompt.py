"""From the turns of a Responses call to its prompt; with `truncation` of what does not fit."""

from dataclasses import dataclass
from typing import Any

from cluster.api.responses.body import ResponseBody
from cluster.api.responses.items import Turn, for_template
from cluster.api.schemas.requests import MAX_MESSAGES
from cluster.errors import InvalidRequest
from cluster.router.router import Router

TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Told:
    """What the chat template is told beside the turns."""

    tools: list[dict[str, Any]]
    variables: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the model reads it."""

    text: str
    token_ids: tuple[int, ...]


async def prompt_of(
    router: Router, body: ResponseBody, turns: list[Turn], told: Told
) -> tuple[Prompt, list[Turn]]:
    """Return a conversation as a prompt, and those of its turns that are in it.

    Raises:
        InvalidRequest: if it cannot be rendered, or is too long and may not be cut.
    """
    if len(turns) > MAX_MESSAGES:
        raise InvalidRequest(f"input: more than {MAX_MESSAGES} turns with those before", "input")
    rendered = for_template(turns)
    prompt = await _prompt(router, body, rendered, told)
    if prompt is not None and (body.truncation != "auto" or _fits(router, body, prompt)):
        return prompt, turns
    # Conversations begin with what a user says: what follows of a turn goes with it.
    starts = [number for number, turn in enumerate(turns) if number and turn["role"] == "user"]
    found: tuple[Prompt, int] | None = None
    while starts and body.truncation == "auto":
        middle = len(starts) // 2
        prompt = await _prompt(router, body, rendered[starts[middle] :], told)
        if prompt is not None and _fits(router, body, prompt):
            found, starts = (prompt, starts[middle]), starts[:middle]
        else:
            starts = starts[middle + 1 :]
    if found is None:
        what = "its last turn" if body.truncation == "auto" else "the input"
        raise InvalidRequest(
            f"this model's context length is {router.config.context_length} tokens, which {what} "
            "does not fit with an answer; truncation='auto' leaves out the oldest turns",
            "input",
            TOO_LONG,
        )
    return found[0], turns[found[1] :]


async def _prompt(
    router: Router, body: ResponseBody, turns: list[Turn], told: Told
) -> Prompt | None:
    """Return the prompt of turns behind the instructions; None if their text is too long."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    variables = told.variables | (body.chat_template_kwargs or {})
    text = await router.render([*system, *turns], True, False, variables, told.tools or None)
    try:
        token_ids = await router.encode(text, bool(body.add_special_tokens))
    except InvalidRequest as error:
        if error.code == TOO_LONG:
            return None
        raise
    if not token_ids:
        raise InvalidRequest("input: it renders to an empty prompt", "input")
    return Prompt(text, token_ids)


def _fits(router: Router, body: ResponseBody, prompt: Prompt) -> bool:
    return len(prompt.token_ids) + (body.max_output_tokens or 1) <= router.config.context_length
