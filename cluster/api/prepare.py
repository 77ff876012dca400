"""From a call's body to the requests of its answers: everything that is done before the first step.

Every route that answers, counts or shows a call of either kind goes through here.
"""

from dataclasses import dataclass

from cluster.api.echo import check_echo, echoed_texts
from cluster.api.prompt_logprobs import num_prompt_logprobs
from cluster.api.prompts.conversation import content_of, conversation_text, text_tokens
from cluster.api.prompts.texts import prompt_tokens, prompts, truncated
from cluster.api.request_builder import (
    Call,
    GenerationLimits,
    build_requests,
    check_grammar,
    choices_of,
    resolve_model,
)
from cluster.api.restrictions import check_token_ids
from cluster.api.schemas.requests import ChatBody, CompletionBody
from cluster.api.tools.enforced_calls import formed
from cluster.api.tools.message_format import (
    begins_in_thought,
    check_tools,
    format_of,
    template_format,
    template_variables,
)
from cluster.api.tools.thinking_budget import budgeted, budgeted_prompts, thinking_budget
from cluster.api.tools.tool_use import tool_use_of
from cluster.errors import InvalidRequest
from cluster.request import Request
from cluster.router.model_resolver import ResolvedModel
from cluster.router.parser.families import MessageFormat
from cluster.router.router import Router

DEFAULT_MAX_TOKENS = 16  # OpenAI's for a completion; a chat may fill the context


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call that can be submitted as it is."""

    call: Call
    model: ResolvedModel
    limits: GenerationLimits
    requests: list[tuple[Request, ...]]  # for each prompt those of its choices
    echoes: tuple[str, ...] = ()  # the text of each prompt, if it is to be shown
    message_format: MessageFormat | None = None  # None: the answer is text and nothing else

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
        num_prompt_logprobs=num_prompt_logprobs(body),
    )
    tools = tool_use_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    template = template_format(router, body.chat_template)
    check_tools(template, tools)
    variables = template_variables(template, body.reasoning_effort)
    await check_grammar(router, call)
    model = await resolve_model(router, call)
    text = await conversation_text(router, body, tools.rendered, variables)
    given = None if body.kv_transfer_params is None else body.kv_transfer_params.prompt_token_ids
    if given is None:
        prompt = await text_tokens(router, text, bool(body.add_special_tokens))
    else:
        check_token_ids(given, router.config, "kv_transfer_params.prompt_token_ids")
        prompt = tuple(given)
    if body.truncate_prompt_tokens is not None:
        prompt = truncated(prompt, body, limits, router.config)
    is_open = begins_in_thought(
        template, text, body.messages[-1].content if body.continue_final_message else None
    )
    budget = None
    if body.thinking_token_budget is not None:
        budget = thinking_budget(router, template, body.thinking_token_budget, is_open=is_open)
    message_format = format_of(
        template,
        tools,
        begins_in_thought=is_open,
        shows_reasoning=body.include_reasoning is not False,
    )
    if message_format is not None:
        call = await formed(router, call, template, tools, message_format, text)
    requests = build_requests(router, call, model, [prompt], limits)
    if budget is not None:
        requests = [budgeted(choices, budget) for choices in requests]
    last = body.messages[-1]
    echoes = (content_of(last),) if body.echo and last.role == "assistant" else ()
    return PreparedCall(call, model, limits, requests, echoes, message_format)


async def prepare_completion(router: Router, call: Call, body: CompletionBody) -> PreparedCall:
    """Return a call of /v1/completions as requests; raises as `prepare_chat`."""
    given = await router.apart(body.prompt, prompts, body.prompt, router.config)
    check_echo(body)
    limits = GenerationLimits(
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=body.logprobs,
        choices=choices_of(body, len(given), router.config),
        num_prompt_logprobs=num_prompt_logprobs(body),
    )
    await check_grammar(router, call)
    model = await resolve_model(router, call)
    tokenized = await prompt_tokens(router, given, body.add_special_tokens is not False)
    kept = [truncated(prompt, body, limits, router.config) for prompt in tokenized]
    requests = build_requests(router, call, model, kept, limits)
    if body.thinking_token_budget is not None:
        requests = await budgeted_prompts(router, requests, body.thinking_token_budget)
    echoes = await echoed_texts(router, given, tokenized, kept) if body.echo else ()
    return PreparedCall(call, model, limits, requests, echoes)


def num_logprobs(body: ChatBody) -> int | None:
    """Return how many alternatives are wanted for each token; None for no log-probabilities."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs=true", "top_logprobs")
    return None
