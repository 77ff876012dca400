"""Budgets of thinking tokens: `thinking_token_budget`, as vLLM spells it.

Owns what a budget needs of the model. A rank keeps to it: `worker.thoughts`.
"""

import asyncio
from collections.abc import Sequence

from msgspec import structs

from cluster.api.tools.message_format import TemplateFormat, begins_in_thought, template_format
from cluster.errors import InvalidRequest
from cluster.request import Request
from cluster.router.parser.thoughts import CLOSE, OPEN
from cluster.router.router import Router
from worker.protocol import ThinkingBudget

PARAM = "thinking_token_budget"
UNLIMITED = -1


def thinking_budget(
    router: Router, template: TemplateFormat, wanted: int, *, is_open: bool
) -> ThinkingBudget | None:
    """Return the budget of an answer; None: it may think as long as it likes.

    Args:
        router: that knows the model's tokens.
        template: that the prompt is made by.
        wanted: tokens; -1: as many as it likes.
        is_open: the answer begins in a thought that its prompt has opened.

    Raises:
        InvalidRequest: if the model's thoughts are not known, or cannot be closed.
    """
    if wanted == UNLIMITED:
        return None
    if not template.reasoning:
        raise InvalidRequest(
            f"{PARAM}: {template.name} knows no thoughts, so none could be counted; "
            "reasoning_parser names how a model writes them",
            PARAM,
            "unsupported_parameter",
        )
    if not router.config.eos_token_ids:  # without one, ranks cannot read the tokens' texts
        raise InvalidRequest(
            f"{PARAM}: the model names no token that ends an answer", PARAM, "unsupported_parameter"
        )
    tokenizer = router.tokenizer
    number = tokenizer.added_tokens((CLOSE,)).get(CLOSE)
    is_token = number is not None and number < router.config.vocab_size
    closing = (number,) if is_token and number is not None else tokenizer.encode(CLOSE, False)
    if tokenizer.decode(closing, skip_special_tokens=False).strip() != CLOSE:
        raise InvalidRequest(
            f"{PARAM}: this model's tokens cannot say {CLOSE}", PARAM, "unsupported_parameter"
        )
    return ThinkingBudget(wanted, OPEN, CLOSE, closing, is_open)


def budgeted(choices: tuple[Request, ...], budget: ThinkingBudget) -> tuple[Request, ...]:
    """Return the choices of a prompt, each with the budget."""
    return tuple(
        structs.replace(choice, sampling=structs.replace(choice.sampling, thinking=budget))
        for choice in choices
    )


async def budgeted_prompts(
    router: Router, prompts: Sequence[tuple[Request, ...]], wanted: int
) -> list[tuple[Request, ...]]:
    """Return the choices of prompts that are texts, each with its budget; raises as above."""
    template = template_format(router)
    if thinking_budget(router, template, wanted, is_open=False) is None:
        return list(prompts)

    def work() -> list[tuple[Request, ...]]:
        made = []
        for choices in prompts:
            text = router.tokenizer.decode(choices[0].token_ids, skip_special_tokens=False)
            is_open = begins_in_thought(template, text, text)
            budget = thinking_budget(router, template, wanted, is_open=is_open)
            made.append(choices if budget is None else budgeted(choices, budget))
        return made

    return await asyncio.to_thread(work)
