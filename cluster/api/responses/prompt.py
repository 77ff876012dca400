"""From the turns of a Responses call to its prompt; with `truncation` of what does not fit."""

from cluster.api.responses.body import ResponseBody
from cluster.api.responses.items import Turn, for_template
from cluster.api.schemas.requests import MAX_MESSAGES
from cluster.errors import InvalidRequest
from cluster.router.router import Router

TOO_LONG = "context_length_exceeded"

Prompt = tuple[int, ...]


async def prompt_of(
    router: Router, body: ResponseBody, turns: list[Turn]
) -> tuple[Prompt, list[Turn]]:
    """Return the tokens of a conversation, and those of its turns that are in them.

    Raises:
        InvalidRequest: if it cannot be rendered, or is too long and may not be cut.
    """
    if len(turns) > MAX_MESSAGES:
        raise InvalidRequest(f"input: more than {MAX_MESSAGES} turns with those before", "input")
    rendered = for_template(turns)
    prompt = await _tokens(router, body, rendered)
    if prompt is not None and (body.truncation != "auto" or _fits(router, body, prompt)):
        return prompt, turns
    # Conversations begin with what a user says: what follows of a turn goes with it.
    starts = [number for number, turn in enumerate(turns) if number and turn["role"] == "user"]
    found: tuple[Prompt, int] | None = None
    while starts and body.truncation == "auto":
        middle = len(starts) // 2
        prompt = await _tokens(router, body, rendered[starts[middle] :])
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


async def _tokens(router: Router, body: ResponseBody, turns: list[Turn]) -> Prompt | None:
    """Return the tokens of turns behind the instructions; None if their text is too long."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    text = await router.render([*system, *turns], True, False, {})
    try:
        prompt = await router.encode(text, bool(body.add_special_tokens))
    except InvalidRequest as error:
        if error.code == TOO_LONG:
            return None
        raise
    if not prompt:
        raise InvalidRequest("input: it renders to an empty prompt", "input")
    return prompt


def _fits(router: Router, body: ResponseBody, prompt: Prompt) -> bool:
    return len(prompt) + (body.max_output_tokens or 1) <= router.config.context_length
