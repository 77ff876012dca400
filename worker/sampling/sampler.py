"""Draw the next token of every sequence from its logits.

Owns the order in which sampling parameters take effect (vLLM's): logit bias, held-back tokens,
penalties, temperature, min_p, top_k, top_p, then the draw. A token is a function of (logits,
parameters, seed, position): rows that share a step never touch each other's numbers.
All of it is asked of the device at once, and nothing is looked at: where the logits are, the next
step may write again. Knows nothing of plans, of stop conditions or of where the logits come from.

Shapes: S rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import AnyKernels, Fetched
from kernels.numbers import Numbers
from kernels.sampling import GREEDY_BELOW, Draw
from worker.sampling.row_logits import Best, RowLogits

if TYPE_CHECKING:
    from worker.protocol import SamplingParams

FAILED = -1  # in place of a token, where there is none


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row of logits and how to draw from it."""

    seq_id: int
    params: "SamplingParams"
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


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The tokens of a step: on the device, and on their way to the host."""

    requests: Sequence[SampleRequest]  # S
    token_ids: Tensor  # [S] int64 on the device; FAILED for NaN or +inf, or nothing but -inf
    told: Sequence[int]  # the rows that ask for log-probabilities
    fetched: Fetched  # token_ids and, if any row asks, what `Kernels.token_logprobs` returns


class Sampler:
    """The sampler of one rank; it keeps no state between calls."""

    def __init__(self, kernels: AnyKernels) -> None:
        self._kernels = kernels

    def sample(self, found: RowLogits, requests: Sequence[SampleRequest]) -> DrawnRows | None:
        """Draw one token for each row on rank 0; return None elsewhere. Every rank must call it.

        Args:
            found: of S rows, not changed.
            requests: S, in the order of the rows; their histories only on rank 0.
        """
        assert len(found.part) == len(requests), "one request for each row of logits"
        drawn = [row for row, request in enumerate(requests) if not request.is_plain_greedy]
        best = found.best()
        logits = found.whole() if drawn else None
        return None if best is None else self._drawn(best, logits, drawn, requests)

    def _drawn(
        self,
        best: Best,
        logits: Tensor | None,
        drawn: Sequence[int],
        requests: Sequence[SampleRequest],
    ) -> DrawnRows:
        """Draw the tokens of the rows in `drawn`, if any, from logits; the others' are the best."""
        values, token_ids = best
        kernels, device = self._kernels, token_ids.device
        told: list[int] = []
        logprobs: Sequence[Tensor] = ()
        if logits is not None:
            adjusted = torch.stack([self._adjusted(logits[row], requests[row]) for row in drawn])
            ids = kernels.draw_rows(adjusted, [requests[row].draw for row in drawn])
            if len(drawn) < len(requests):
                ids = token_ids.index_copy(0, kernels.send(drawn, torch.int64, device), ids)
            token_ids = ids
            counts = {
                row: n for row in drawn if (n := requests[row].params.num_logprobs) is not None
            }
            told = list(counts)
            if told:
                logprobs = kernels.token_logprobs(logits, told, token_ids, list(counts.values()))
        # NaN and +inf win any maximum, and a row of -inf has no other: one pass finds all three.
        token_ids = token_ids.masked_fill(values.isfinite().logical_not_(), FAILED)
        return DrawnRows(requests, token_ids, told, kernels.fetch((token_ids, *logprobs), device))

    def _adjusted(self, logits: Tensor, request: SampleRequest) -> Tensor:
        """Return the row [V] after logit bias, held-back tokens and penalties."""
        params = request.params
        if not (params.logit_bias or params.needs_history or request.is_held_back):
            return logits
        adjusted = logits.clone()
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            adjusted.index_add_(0, self._ids(ids, logits), self._values(biases, logits))
        if request.is_held_back:
            adjusted.index_fill_(0, self._ids(params.held_back, logits), -torch.inf)
        if params.needs_history:
            self._penalize(adjusted, request)
        return adjusted

    def _penalize(self, logits: Tensor, request: SampleRequest) -> None:
        """Apply the three penalties in place: repetition over all tokens, the others over output.

        What was seen is counted on the host, where it is known how much that is.
        """
        params = request.params
        history = np.array(request.history, dtype=np.int64)
        assert len(history) == request.position, "history must hold every token before the position"
        seen = self._ids(np.flatnonzero(np.bincount(history)), logits)
        values, penalty = logits.index_select(0, seen), params.repetition_penalty
        logits.index_copy_(0, seen, torch.where(values > 0, values / penalty, values * penalty))
        counts = np.bincount(history[request.num_prompt_tokens :])
        output = np.flatnonzero(counts)
        lowered = counts[output].astype(np.float32) * np.float32(params.frequency_penalty)
        lowered += np.float32(params.presence_penalty)
        logits.index_add_(0, self._ids(output, logits), self._values(-lowered, logits))

    def _ids(self, token_ids: Numbers, logits: Tensor) -> Tensor:
        """Return token ids as int64 beside the logits."""
        return self._kernels.send(token_ids, torch.int64, logits.device)

    def _values(self, values: Numbers, logits: Tensor) -> Tensor:
        """Return values like the logits, beside them."""
        return self._kernels.send(values, logits.dtype, logits.device)
