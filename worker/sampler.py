"""Draw the next token of every sequence from its logits.

Owns the order in which sampling parameters take effect (vLLM's): logit bias, held-back tokens,
penalties, temperature, min_p, top_k, top_p, then the draw. A token is a function of (logits,
parameters, seed, position): rows that share a step never touch each other's numbers.
Knows nothing of plans, of stop conditions or of where the logits come from.

Shapes: S rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import gumbel_noise, gumbel_noise_at
from worker.protocol import SampledToken, SamplingParams

_LOWEST = torch.finfo(torch.float32).min
GREEDY_BELOW = 1e-5  # lower temperatures are greedy: dividing by them only overflows float32
_BINS_PER_NAT = 4  # top_p: width and number of the bins in which it adds the mass up
_NUM_BINS = 128
_MASS_MARGIN = 1e-4  # far above what the histogram's float32 exponentials can be off by


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row of logits and how to draw from it."""

    seq_id: int
    params: SamplingParams
    position: int  # of the token to be drawn
    num_prompt_tokens: int
    history: Sequence[int]  # tokens [0, position) if params.needs_history, else empty

    @property
    def is_held_back(self) -> bool:
        """Whether `held_back` tokens are still forbidden."""
        params = self.params
        return bool(params.held_back) and (
            self.position - self.num_prompt_tokens < params.min_tokens
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the largest raw logit and nothing else is asked."""
        params = self.params
        return (
            params.temperature < GREEDY_BELOW
            and params.num_logprobs is None
            and not params.logit_bias
            and not params.needs_history
            and not self.is_held_back
        )


class Sampler:
    """The sampler of one rank; it keeps no state between calls."""

    def sample(
        self, logits: Tensor, requests: Sequence[SampleRequest]
    ) -> tuple[list[SampledToken], list[int]]:
        """Draw one token for each row.

        Args:
            logits: [S, V] float32, not changed.
            requests: S, in the order of the rows.

        Returns:
            The tokens in row order, and the seq_ids whose logits hold NaN or +inf, or nothing but
            -inf; these have no token.
        """
        assert logits.shape[0] == len(requests), "one request for each row of logits"
        if not requests:
            return [], []
        # NaN and +inf win any maximum, and a row of -inf has no other: one pass finds all three.
        best, best_ids = logits.max(dim=-1)
        is_finite = torch.isfinite(best).tolist()
        greedy_ids = best_ids.tolist()
        tokens: list[SampledToken] = []
        failed: list[int] = []
        for row, request in enumerate(requests):
            if not is_finite[row]:
                failed.append(request.seq_id)
            elif request.is_plain_greedy:
                tokens.append(SampledToken(request.seq_id, greedy_ids[row]))
            else:
                tokens.append(_sample_row(logits[row], request))
        return tokens, failed


def _sample_row(logits: Tensor, request: SampleRequest) -> SampledToken:
    """Draw from one row [V]."""
    params = request.params
    token_id = _draw(_adjusted(logits, request), request)
    if params.num_logprobs is None:
        return SampledToken(request.seq_id, token_id)
    logprobs = torch.log_softmax(logits, dim=-1)
    top = _best(logprobs, params.num_logprobs) if params.num_logprobs else None
    return SampledToken(
        request.seq_id,
        token_id,
        logprob=float(logprobs[token_id]),
        top_logprobs=()
        if top is None
        else tuple(zip(top[0].tolist(), top[1].tolist(), strict=True)),
    )


def _adjusted(logits: Tensor, request: SampleRequest) -> Tensor:
    """Return the row [V] after logit bias, held-back tokens and penalties."""
    params = request.params
    if not (params.logit_bias or params.needs_history or request.is_held_back):
        return logits
    adjusted = logits.clone()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        adjusted.index_add_(0, torch.tensor(ids), torch.tensor(biases, dtype=adjusted.dtype))
    if request.is_held_back:
        adjusted[torch.tensor(params.held_back)] = -torch.inf
    if params.needs_history:
        _penalize(adjusted, request)
    return adjusted


def _penalize(logits: Tensor, request: SampleRequest) -> None:
    """Apply the three penalties in place: repetition over all tokens, the others over output."""
    params = request.params
    history = torch.tensor(request.history, dtype=torch.int64)
    assert len(history) == request.position, "history must hold every token before the position"
    seen = history.bincount().nonzero().squeeze(-1)
    values = logits[seen]
    penalty = params.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = history[request.num_prompt_tokens :].bincount()
    output = counts.nonzero().squeeze(-1)
    logits[output] -= params.frequency_penalty * counts[output] + params.presence_penalty


def _draw(logits: Tensor, request: SampleRequest) -> int:
    """Return the token drawn from an adjusted row [V]."""
    params = request.params
    if params.temperature < GREEDY_BELOW or params.top_k == 1:
        return int(logits.argmax())
    scores = (logits - logits.max()) / params.temperature  # the best is 0: nothing can overflow
    if params.min_p > 0.0:
        scores.masked_fill_(scores < math.log(params.min_p), -torch.inf)
    num_tokens = scores.shape[0]
    if 0 < params.top_k < num_tokens:
        ids, kept = _best(scores, params.top_k)
        if params.top_p < 1.0:
            kept = kept[: _nucleus_size(kept, torch.logsumexp(kept, 0), params.top_p)]
    elif params.top_p < 1.0:
        ids, kept = _nucleus(scores, params.top_p)
    else:
        noise = gumbel_noise(params.seed, request.position, num_tokens)
        return int(scores.add_(noise).argmax())
    ids, order = ids[: kept.shape[0]].sort()  # the lowest id wins a tie, as in a full draw
    noise = gumbel_noise_at(params.seed, request.position, ids)
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


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (ids, values) of the `count` largest of [V], best first, then lower id first.

    Tokens at -inf do not count: with fewer others, the result is shorter.
    """
    count = min(count, scores.shape[0])
    least = scores.topk(count, sorted=False).values.min().clamp(min=_LOWEST)
    ids = (scores >= least).nonzero().squeeze(-1)  # ascending, with all that equal the last
    values, order = scores[ids].sort(descending=True, stable=True)
    return ids[order][:count], values[:count]
