"""Log-probabilities of a prompt's tokens: by `prompt_logprobs`, or by `echo` with `logprobs`.

Owns what may be asked for, and vLLM's shape of them. The first token of a prompt has none.
"""

from collections.abc import Sequence

from msgspec import structs

from cluster.api.schemas.requests import CompletionBody, TextBody
from cluster.api.schemas.responses import LOGPROB_FLOOR, PromptLogprob, PromptLogprobsList
from cluster.errors import InvalidRequest
from cluster.request import Request
from cluster.router.output_processor import TokenLogprob
from cluster.router.tokenizer import Tokenizer
from worker.protocol import TokenLogprobs

MAX_ENTRIES = 2**18  # of one prompt: its tokens times the alternatives of each


def num_prompt_logprobs(body: TextBody) -> int | None:
    """Return how many alternatives are wanted for each token of a prompt; None: nothing.

    Raises:
        InvalidRequest: for a stream, or beside what cannot be told again.
    """
    wanted = body.prompt_logprobs
    if wanted is not None and body.stream:
        raise InvalidRequest("prompt_logprobs: not in a stream", "prompt_logprobs")
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        wanted = max(wanted or 0, body.logprobs)
    options = body.stream_options
    if wanted is not None and options is not None and options.resumable:
        raise InvalidRequest(
            "stream_options.resumable: not with log-probabilities of the prompt",
            "stream_options.resumable",
        )
    return wanted


def scored(choices: tuple[Request, ...], num_best: int) -> tuple[Request, ...]:
    """Return the choices of a prompt, of which the first asks for its log-probabilities.

    Raises:
        InvalidRequest: if they are too many.
    """
    first, *others = choices
    num_entries = len(first.token_ids) * (num_best + 1)
    if num_entries > MAX_ENTRIES:
        raise InvalidRequest(
            f"prompt_logprobs: {len(first.token_ids)} tokens with {num_best} alternatives each are "
            f"{num_entries} entries, over the limit of {MAX_ENTRIES}",
            "prompt_logprobs",
        )
    sampling = structs.replace(first.sampling, prompt_logprobs=num_best)
    return (structs.replace(first, sampling=sampling), *others)


def entries_of(
    prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], num_best: int
) -> list[TokenLogprob]:
    """Return the tokens of a prompt from the second on, with at most so many alternatives."""
    assert len(logprobs) == len(prompt) - 1, f"{len(logprobs)} of {len(prompt)} tokens are scored"
    return [
        TokenLogprob(token_id, logprob, top[:num_best])
        for token_id, (logprob, top, _) in zip(prompt[1:], logprobs, strict=True)
    ]


def spelled(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs], num_best: int
) -> PromptLogprobsList:
    """Return them in vLLM's shape."""
    shown: PromptLogprobsList = [None]
    ranks = [rank for _, _, rank in logprobs]
    for entry, own_rank in zip(entries_of(prompt, logprobs, num_best), ranks, strict=True):
        at: dict[str, PromptLogprob] = {}
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            at[str(token_id)] = _of(tokenizer, token_id, logprob, rank)
        if str(entry.token_id) not in at:
            at[str(entry.token_id)] = _of(tokenizer, entry.token_id, entry.logprob, own_rank)
        shown.append(at)
    return shown


def _of(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> PromptLogprob:
    return PromptLogprob(max(logprob, LOGPROB_FLOOR), rank, tokenizer.token_text(token_id))
