"""Draw the next token of every sequence from its logits.

Owns the order in which sampling parameters take effect (vLLM's): logit bias, held-back tokens,
penalties, temperature, min_p, top_k, top_p, then the draw. A token is a function of (logits,
parameters, seed, position): rows that share a step never touch each other's numbers.
Knows nothing of plans, of stop conditions or of where the logits come from.

Shapes: S rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import AnyKernels
from kernels.drawing import GREEDY_BELOW, Draw, best_tokens
from worker.protocol import SampledToken, SamplingParams


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
    def draw(self) -> Draw:
        """How to draw from the row once it is adjusted."""
        params = self.params
        return Draw(
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seed,
            self.position,
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

    def __init__(self, kernels: AnyKernels) -> None:
        self._kernels = kernels

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
        best, best_ids = self._kernels.best(logits)
        is_finite = torch.isfinite(best).tolist()
        token_ids = best_ids.tolist()
        drawn = [
            row
            for row, request in enumerate(requests)
            if is_finite[row] and not request.is_plain_greedy
        ]
        if drawn:
            adjusted = torch.stack([_adjusted(logits[row], requests[row]) for row in drawn])
            ids = self._kernels.draw_rows(adjusted, [requests[row].draw for row in drawn])
            for row, token_id in zip(drawn, ids.tolist(), strict=True):
                token_ids[row] = token_id
        tokens: list[SampledToken] = []
        failed: list[int] = []
        for row, request in enumerate(requests):
            if is_finite[row]:
                tokens.append(_sampled(logits[row], request, token_ids[row]))
            else:
                failed.append(request.seq_id)
        return tokens, failed


def _sampled(logits: Tensor, request: SampleRequest, token_id: int) -> SampledToken:
    """Return what is told of the token that was drawn from one row [V]."""
    num_logprobs = request.params.num_logprobs
    if num_logprobs is None:
        return SampledToken(request.seq_id, token_id)
    logprobs = torch.log_softmax(logits, dim=-1)
    top = best_tokens(logprobs, num_logprobs) if num_logprobs else None
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
        device = adjusted.device
        biases_there = torch.tensor(biases, dtype=adjusted.dtype, device=device)
        adjusted.index_add_(0, torch.tensor(ids, device=device), biases_there)
    if request.is_held_back:
        adjusted[torch.tensor(params.held_back, device=adjusted.device)] = -torch.inf
    if params.needs_history:
        _penalize(adjusted, request)
    return adjusted


def _penalize(logits: Tensor, request: SampleRequest) -> None:
    """Apply the three penalties in place: repetition over all tokens, the others over output."""
    params = request.params
    history = torch.tensor(request.history, dtype=torch.int64, device=logits.device)
    assert len(history) == request.position, "history must hold every token before the position"
    seen = history.bincount().nonzero().squeeze(-1)
    values = logits[seen]
    penalty = params.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = history[request.num_prompt_tokens :].bincount()
    output = counts.nonzero().squeeze(-1)
    logits[output] -= params.frequency_penalty * counts[output] + params.presence_penalty
