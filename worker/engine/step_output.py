"""What rank 0 answers of a step: the tokens that were sampled, and who got none."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.engine.pooling import PooledRows
from worker.engine.prompt_scorer import ScoredTargets
from worker.protocol import SampledToken, StepOutput
from worker.sampling.grammar_masks import GrammarMasks
from worker.sampling.sampler import FAILED, SampledRows


class PromptOutput(NamedTuple):
    """What a step has made of prompts beside tokens; None where nothing of that kind is wanted."""

    pooled: PooledRows | None = None
    scored: ScoredTargets | None = None


NO_PROMPTS = PromptOutput()


def build_step_output(
    step: int,
    rows: SampledRows | None,
    grammars: GrammarMasks | None = None,
    prompts: PromptOutput = NO_PROMPTS,
) -> StepOutput:
    """Wait for what a step has sampled, pooled and scored, if anything, and return its output."""
    pooled, not_pooled = ((), frozenset()) if prompts.pooled is None else prompts.pooled.read()
    scored, not_scored = ((), frozenset()) if prompts.scored is None else prompts.scored.read()
    not_finite = not_scored | not_pooled
    if rows is None:
        failures = tuple(sorted(not_finite))
        return StepOutput(step, (), failures, prompt_logprobs=scored, pooled=pooled)
    token_ids, *logprobs = rows.readback.read()
    of_row = dict(_logprobs(rows, token_ids.tolist(), *logprobs)) if rows.logprob_rows else {}
    tokens: list[SampledToken] = []
    failed: list[int] = []
    errors: list[tuple[int, str]] = []
    for row, (request, token_id) in enumerate(zip(rows.requests, token_ids.tolist(), strict=True)):
        logprob, top_logprobs = of_row.get(row, (None, ()))
        forced: tuple[int, ...] = ()
        if request.sampling.is_guided and request.params.grammar:
            assert grammars is not None, "rank 0 draws"
            if error := grammars.error(request.seq_id):
                errors.append((request.seq_id, error))
                token_id = FAILED
            elif token_id != FAILED:
                following = grammars.sampled(request.seq_id, request.output_index, token_id)
                forced = following if request.params.num_logprobs is None else ()
        if token_id == FAILED or request.seq_id in not_scored:
            failed.append(request.seq_id)
        else:
            tokens.append(SampledToken(request.seq_id, token_id, logprob, top_logprobs, forced))
    num_masks = num_late = 0
    if grammars is not None:
        grammars.begin()
        num_masks, num_late = grammars.take_counts()
    failed += sorted(not_finite.difference(failed))
    return StepOutput(
        step, tuple(tokens), tuple(failed), tuple(errors), scored, num_masks, num_late, pooled
    )


def _logprobs(
    rows: SampledRows,
    token_ids: Sequence[int],
    chosen: Tensor,
    best_ids: Tensor,
    best: Tensor,
    named: Tensor | None = None,
) -> Iterator[tuple[int, tuple[float, tuple[tuple[int, float], ...]]]]:
    """Give each row that asks for log-probabilities, and the last two fields of its token.

    Where a row names tokens, they come in place of the best, behind the one that was sampled.
    """
    of_named = iter([] if named is None else named.tolist())
    values: Sequence[tuple[float, list[int], list[float]]] = list(
        zip(chosen.tolist(), best_ids.tolist(), best.tolist(), strict=True)
    )
    for row, (logprob, ids, logprobs) in zip(rows.logprob_rows, values, strict=True):
        wanted = rows.requests[row].params.logprob_token_ids
        if wanted:
            others = {token_id: next(of_named) for token_id in wanted}
            yield row, (logprob, tuple({token_ids[row]: logprob, **others}.items()))
            continue
        count = rows.requests[row].params.num_logprobs or 0
        top = list(zip(ids, logprobs, strict=True))[:count]
        yield row, (logprob, tuple((i, value) for i, value in top if value != -torch.inf))
