"""The sampler: the next token of every sequence from its logits.

Owns the order in which sampling parameters take effect (vLLM's): a token that closes a thought,
the grammar or the allowed tokens, logit bias, forbidden tokens, penalties, temperature, min_p,
top_k, top_p, then the random draw. A token is a function of (logits, parameters, seed, position,
and what came before where a grammar, a bad word, a penalty or a budget of thoughts looks at it):
rows that share a step never touch each other's numbers.
Everything is queued on the device without a wait, because the next step may overwrite the logits.

Shapes: S rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from kernels.interface import AnyKernels, Numbers, Readback
from worker.sampling.forbidden_tokens import completing, forbidden_tokens
from worker.sampling.row_logits import Argmax, RowLogits
from worker.sampling.sequence_sampling import SequenceSampling
from worker.token_mask import Mask, allows, mask_of, only

if TYPE_CHECKING:
    from worker.protocol import SamplingParams

FAILED = -1  # in place of a token, where there is none


class SampleRequest(msgspec.Struct, frozen=True):
    """One row of logits and how to sample from it."""

    seq_id: int
    sampling: SequenceSampling
    position: int  # of the token to be sampled
    num_prompt_tokens: int
    history: Sequence[int]  # tokens [0, position) if params.needs_history, else empty
    allowed: Mask | None = None  # by the grammar; None: anything
    forced: int | None = None  # that comes next unless a grammar forbids it; only on rank 0

    @property
    def params(self) -> "SamplingParams":
        """What the client asked for."""
        return self.sampling.params

    @property
    def output_index(self) -> int:
        """Which of the output tokens is to be sampled: 0, 1, 2, ..."""
        return self.position - self.num_prompt_tokens

    @property
    def held_back(self) -> tuple[int, ...]:
        """The tokens that the answer is too short for."""
        return self.params.held_back if self.output_index < self.params.min_tokens else ()

    @property
    def restricts(self) -> bool:
        """Whether some tokens cannot be drawn; the same on every rank."""
        return self.sampling.restricts(self.output_index)

    def restrictions(self, vocab_size: int) -> tuple[Mask | None, list[int]]:
        """Return (what may be drawn if not all of it, tokens that are forbidden besides)."""
        params, allowed = self.params, self.allowed
        if self.forced is not None and (allowed is None or allows(allowed, self.forced)):
            return only(self.forced, vocab_size), []
        if params.allowed_tokens:
            assert allowed is None, "a grammar says which tokens may come"
            allowed = mask_of(params.allowed_tokens, vocab_size)
        bad: frozenset[int] = frozenset()
        if params.bad_words:
            bad = completing(params.bad_words, self.history[self.num_prompt_tokens :])
        return allowed, forbidden_tokens(allowed, bad, self.held_back, vocab_size)

    @property
    def is_adjusted(self) -> bool:
        """Whether the logits are changed before a token is drawn."""
        sampling = self.sampling
        return sampling.may_adjust and sampling.adjusts(self.output_index)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the largest raw logit and nothing else is asked."""
        return self.sampling.takes_largest and not self.is_adjusted


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens of a step: on the device, and being copied to the host."""

    requests: Sequence[SampleRequest]  # S
    token_ids: Tensor  # [S] int64 on the device; FAILED for NaN or +inf, or nothing but -inf
    logprob_rows: Sequence[int]  # those that ask for log-probabilities
    # token_ids and, if any row asks, what `Kernels.token_logprobs` returns; behind that, if any row
    # names tokens, the log-probabilities of all that are named, in the order of the rows.
    readback: Readback


class Sampler:
    """The sampler of one rank; it keeps no state between calls."""

    def __init__(self, kernels: AnyKernels) -> None:
        self._kernels = kernels

    def sample(
        self, row_logits: RowLogits, requests: Sequence[SampleRequest]
    ) -> SampledRows | None:
        """Sample one token for each row on rank 0; None elsewhere. Every rank must call it.

        Args:
            row_logits: of S rows, not changed.
            requests: S, in the order of the rows; their histories only on rank 0.
        """
        assert row_logits.part.shape[0] == len(requests), "one request for each row of logits"
        rows = [  # `is_plain_greedy`, without a call for each row that is drawn
            row
            for row, request in enumerate(requests)
            if not request.sampling.takes_largest or not request.is_plain_greedy
        ]
        argmax = row_logits.argmax()
        logits = row_logits.whole() if rows else None
        return None if argmax is None else self._sample(argmax, logits, rows, requests)

    def _sample(
        self,
        argmax: Argmax,
        logits: Tensor | None,
        rows: Sequence[int],
        requests: Sequence[SampleRequest],
    ) -> SampledRows:
        """Sample the tokens of `rows`, if any, from logits; those of the others are the argmax."""
        values, token_ids = argmax
        kernels, device = self._kernels, token_ids.device
        logprob_rows: list[int] = []
        logprobs: Sequence[Tensor] = ()
        if logits is not None:
            is_all = len(rows) == len(requests)
            drawn = requests if is_all else [requests[row] for row in rows]
            draws = kernels.send_draws(
                rows,
                [request.sampling.draw for request in drawn],
                [request.position for request in drawn],
                device,
            )
            adjusted = self._adjusted(logits, draws.rows, drawn)
            ids = kernels.sample_rows(adjusted, draws)
            if not is_all:
                ids = token_ids.index_copy(0, draws.rows, ids)
            token_ids = ids
            counts = {
                row: n
                for row, request in zip(rows, drawn, strict=True)
                if (n := request.sampling.num_logprobs) is not None
            }
            logprob_rows = list(counts)
            if logprob_rows:
                best = kernels.token_logprobs(
                    logits, logprob_rows, token_ids, list(counts.values())
                )
                logprobs = *best, *self._named(logits, logprob_rows, requests)
        # NaN and +inf win any maximum, and a row of -inf has no other: one pass finds all three.
        token_ids = kernels.where_finite(values, token_ids, FAILED)
        readback = kernels.start_readback((token_ids, *logprobs), device)
        return SampledRows(requests, token_ids, logprob_rows, readback)

    def _named(
        self, logits: Tensor, rows: Sequence[int], requests: Sequence[SampleRequest]
    ) -> tuple[Tensor, ...]:
        """Return the log-probabilities [N] of the tokens that rows name; nothing if none does."""
        parts = []
        for row in rows:
            named = requests[row].params.logprob_token_ids
            if named:
                same = logits[row].expand(len(named), -1)
                ids = self._ids(named, logits)
                some = range(len(named))
                parts.append(self._kernels.token_logprobs(same, some, ids, [0] * len(named))[0])
        return (torch.cat(parts),) if parts else ()

    def _adjusted(self, logits: Tensor, rows: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
        """Return some rows [R, V] after logit bias, forbidden tokens and penalties.

        The logits themselves where all rows are drawn from as they are: a copy of them would take
        as long as a good part of the draw.
        """
        adjusting = [
            row
            for row, request in enumerate(requests)
            if request.sampling.may_adjust and request.is_adjusted
        ]
        if len(requests) < logits.shape[0]:
            adjusted = logits.index_select(0, rows)
        else:
            adjusted = logits.clone() if adjusting else logits
        restrictions = {
            row: requests[row].restrictions(adjusted.shape[1])
            for row in adjusting
            if requests[row].restricts
        }
        masks = {row: mask for row, (mask, _) in restrictions.items() if mask is not None}
        if masks:
            self._kernels.keep_allowed(adjusted, list(masks), list(masks.values()))
        for row in adjusting:
            _, forbidden = restrictions.get(row, (None, ()))
            self._adjust(adjusted[row], requests[row], forbidden)
        return adjusted

    def _adjust(self, logits: Tensor, request: SampleRequest, forbidden: Sequence[int]) -> None:
        """Apply logit bias, forbidden tokens and penalties to a row [V] in place."""
        params = request.params
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            logits.index_add_(0, self._ids(ids, logits), self._values(biases, logits))
        if forbidden:
            logits.index_fill_(0, self._ids(forbidden, logits), -torch.inf)
        if params.has_penalties:
            self._penalize(logits, request)

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
