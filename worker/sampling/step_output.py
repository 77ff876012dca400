"""What rank 0 answers to a plan: the tokens that were drawn, once they have reached the host.

Knows nothing of how they are drawn.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from worker.protocol import SampledToken, StepOutput
from worker.sampling.sampler import FAILED, DrawnRows


def output_of(step: int, rows: DrawnRows | None) -> StepOutput:
    """Wait for a step that drew these rows, maybe none, and return its output."""
    if rows is None:
        return StepOutput(step, ())
    token_ids, *logprobs = rows.fetched.read()
    of_row = dict(_logprobs(rows, *logprobs)) if rows.told else {}
    tokens: list[SampledToken] = []
    failed: list[int] = []
    for row, (request, token_id) in enumerate(zip(rows.requests, token_ids.tolist(), strict=True)):
        if token_id == FAILED:
            failed.append(request.seq_id)
        else:
            tokens.append(SampledToken(request.seq_id, token_id, *of_row.get(row, ())))
    return StepOutput(step, tuple(tokens), tuple(failed))


def _logprobs(
    rows: DrawnRows, chosen: Tensor, best_ids: Tensor, best: Tensor
) -> Iterator[tuple[int, tuple[float, tuple[tuple[int, float], ...]]]]:
    """Give each row that asks for log-probabilities, and the last two fields of its token."""
    told: Sequence[tuple[float, list[int], list[float]]] = list(
        zip(chosen.tolist(), best_ids.tolist(), best.tolist(), strict=True)
    )
    for row, (logprob, ids, values) in zip(rows.told, told, strict=True):
        count = rows.requests[row].params.num_logprobs or 0
        top = list(zip(ids, values, strict=True))[:count]
        yield row, (logprob, tuple((i, value) for i, value in top if value != -torch.inf))
