"""Samples tokens from rows of logits on a CPU: truncation by min_p, top_k and top_p, then the draw.

A token is a function of (logits, parameters, seed, position), by the noise of kernels.gumbel_noise:
the largest of score plus noise follows the softmax of the scores (Gumbel's trick).

Shapes: S rows, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.gumbel_noise import gumbel_argmax, gumbel_noise_at

GREEDY_BELOW = 1e-5  # lower temperatures are greedy: dividing by them only overflows float32
# Given finite or -inf scores [V], seed and position: `gumbel_argmax`, by whatever means.
GumbelArgmax = Callable[[Tensor, int, int], int]
_LOWEST = torch.finfo(torch.float32).min
_MOST_TOKENS = np.iinfo(np.int32).max
_BINS_PER_NAT = 4  # top_p: width and number of the bins in which it adds the mass up
_NUM_BINS = 128
_MASS_MARGIN = 1e-4  # far above what the histogram's float32 exponentials can be off by


# A `RowSampling` in memory, as a GPU's kernels take its fields.
RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
    ]
)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row's token is sampled: the same for all tokens of a sequence, so made once for it."""

    temperature: float
    top_k: int  # 0: all tokens
    top_p: float
    min_p: float
    seed: int  # 64 bits, unsigned
    record: bytes = field(init=False, repr=False, compare=False)  # a RECORD

    def __post_init__(self) -> None:
        # Any number is a client's to send; more than there are tokens is all of them.
        top_k = min(self.top_k, _MOST_TOKENS)
        values = (self.seed, self.temperature, top_k, self.top_p, self.min_p)
        object.__setattr__(self, "record", np.array(values, RECORD).tobytes())

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is taken, whatever the seed."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True, slots=True)
class RowDraws:
    """How some rows of a step are sampled, as its kernels have it."""

    rows: Tensor  # [S] int64 beside the logits: their numbers in the step
    draws: Sequence[RowSampling]  # S
    positions: Sequence[int]  # S: of the tokens in their sequences
    columns: tuple[Tensor, ...] = ()  # [S] each, of a GPU: the fields of the draws, the positions


def sample_rows(
    logits: Tensor,
    draws: Sequence[RowSampling],
    positions: Sequence[int],
    argmax: GumbelArgmax = gumbel_argmax,
) -> Tensor:
    """Return the token [S] int64 drawn from each row of [S, V] float32, finite or -inf.

    A row that holds NaN or +inf, or nothing but -inf, gets the id of its largest, NaN above all.
    """
    rows = zip(logits, draws, positions, strict=True)
    return torch.tensor([_draw(row, draw, position, argmax) for row, draw, position in rows])


def token_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.interface.Kernels.token_logprobs`; one row after the other."""
    ids = token_ids.tolist()
    # Row by row in a function of its own: memory that was left just now is the fastest to take.
    found = [_logprobs(logits[row], ids[row], n) for row, n in zip(rows, counts, strict=True)]
    best_ids = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    best = torch.full(best_ids.shape, -torch.inf)
    for place, (_, its_ids, its_values) in enumerate(found):
        if len(its_ids):
            best_ids[place, : len(its_ids)] = its_ids
            best[place, : len(its_ids)] = its_values
    return torch.tensor([logprob for logprob, _, _ in found]), best_ids, best


def _logprobs(logits: Tensor, token_id: int, count: int) -> tuple[float, Tensor, Tensor]:
    """Return the log-probability of a token of one row [V], and ids and those of the best."""
    logprobs = torch.log_softmax(logits, dim=-1)
    ids, values = top_tokens(logprobs, count) if count else (logits[:0].long(), logits[:0])
    return logprobs[token_id].item(), ids, values


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (ids, values) of the `count` largest of one row [V], best first, then lower id first.

    Tokens at -inf do not count: with fewer others, the result is shorter.
    """
    count = min(count, logits.shape[0])
    least = logits.topk(count, sorted=False).values.min().clamp(min=_LOWEST)
    ids = (logits >= least).nonzero().squeeze(-1)  # ascending, with all that equal the last
    values, order = logits[ids].sort(descending=True, stable=True)
    return ids[order][:count], values[:count]


def _draw(logits: Tensor, draw: RowSampling, position: int, argmax: GumbelArgmax) -> int:
    """Return the token drawn from one row [V] for a position."""
    if draw.is_greedy or not math.isfinite(best := logits.max()):
        return int(logits.argmax())
    scores = (logits - best) / draw.temperature  # the best is 0: nothing can overflow
    if draw.min_p > 0.0:
        scores.masked_fill_(scores < math.log(draw.min_p), -torch.inf)
    num_tokens = scores.shape[0]
    if 0 < draw.top_k < num_tokens:
        ids, kept = top_tokens(scores, draw.top_k)
        if draw.top_p < 1.0:
            kept = kept[: _nucleus_size(kept, torch.logsumexp(kept, 0), draw.top_p)]
    elif draw.top_p < 1.0:
        ids, kept = _nucleus(scores, draw.top_p)
    else:
        return argmax(scores, draw.seed, position)
    ids, order = ids[: kept.shape[0]].sort()  # the lowest id wins a tie, as in a full draw
    noise = gumbel_noise_at(draw.seed, position, ids)
    return int(ids[(kept[order] + noise).argmax()])


def _nucleus(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return (ids, scores) of the smallest best set of a row [V] that holds `top_p` of the mass.

    Only the tokens near the top are sorted: a histogram of the mass by depth below the best score
    (which is 0) tells how deep to go.
    """
    mass = torch.logsumexp(scores, 0)
    depth = (scores * -_BINS_PER_NAT).clamp_(max=_NUM_BINS - 1).long()
    histogram = depth.bincount(weights=(scores - mass).exp(), minlength=_NUM_BINS)
    deepest = int((histogram.cumsum(0) < top_p + _MASS_MARGIN).sum())
    ids = (depth <= deepest).nonzero().squeeze(-1)
    values, order = scores[ids].sort(descending=True, stable=True)
    size = _nucleus_size(values, mass, top_p)
    return ids[order][:size], values[:size]


def _nucleus_size(descending: Tensor, mass: Tensor, top_p: float) -> int:
    """Return how many of the best scores it takes to reach `top_p`; at least one."""
    probabilities = (descending - mass).double().exp()
    before = probabilities.cumsum(0) - probabilities
    return max(1, int((before < top_p).sum()))
