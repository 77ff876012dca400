"""From a call's body to the requests of its answers: everything that is done before the first step.

Every route that answers, counts or shows a call of either kind goes through here.
"""

from dataclasses import dataclass

from cluster.api.prompts.conversation import conversation_tokens
from cluster.api.prompts.texts import prompt_tokens, prompts
from cluster.api.request_builder import (
    Call,
    GenerationLimits,
    build_requests,
    check_grammar,
    choices_of,
    resolve_model,
)
from cluster.api.schemas.requests import ChatBody, CompletionBody
from cluster.errors import InvalidRequest
from cluster.request import Request
from cluster.router.model_resolver import ResolvedModel
from cluster.router.router import Router

DEFAULT_MAX_TOKENS = 16  # OpenAI's for a completion; a chat may fill the context


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that can be submitted as it is."""

    call: Call
    model: ResolvedModel
    limits: GenerationLimits
    requests: list[tuple[Request, ...]]  # for each prompt those of its choices

    @property
    def shows_logprobs(self) -> bool:
        """Whether the answer carries log-probabilities."""
        return self.limits.num_logprobs is not None


async def prepare_chat(router: Router, call: Call, body: ChatBody) -> PreparedCall:
    """Return a conversation's call as requests.

    Raises:
        InvalidRequest: for what cannot be answered, with the reason.
        NotFound: if there is no such model.
        Forbidden: if the caller may not have the priority.
    """
    limits = GenerationLimits(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        num_logprobs=num_logprobs(body),
        choices=choices_of(body, 1, router.config),
    )
    await check_grammar(router, call)
    model = await resolve_model(router, call)
    prompt = await conversation_tokens(router, body, bool(body.add_special_tokens))
    requests = build_requests(router, call, model, [prompt], limits)
    return PreparedCall(call, model, limits, requests)


async def prepare_completion(router: Router, call: Call, body: CompletionBody) -> PreparedCall:
    """Return a call of /v1/completions as requests; raises as `prepare_chat`."""
    given = prompts(body.prompt, router.config)
    limits = GenerationLimits(
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=body.logprobs,
        choices=choices_of(body, len(given), router.config),
    )
    await check_grammar(router, call)
    model = await resolve_model(router, call)
    tokenized = await prompt_tokens(router, given, body.add_special_tokens is not False)
    requests = build_requests(router, call, model, tokenized, limits)
    return PreparedCall(call, model, limits, requests)


def num_logprobs(body: ChatBody) -> int | None:
    """Return how many alternatives are wanted for each token; None for no log-probabilities."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs=true", "top_logprobs")
    return None
