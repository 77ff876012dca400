"""The log-probabilities of prompts' tokens, chunk by chunk, each of the unmodified logits.

A prompt's logits would not fit beside the KV pages all at once, 400 KB a row at a vocabulary of
100,000: a few rows are taken through the head at a time. Products are batch-invariant, so that
changes no bit.

Shapes: R rows of which the hidden states are wanted, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import AnyKernels, Readback
from worker.lora.adapter_bank import AdapterBank
from worker.models.decoder import Model
from worker.models.forward_batch import InputBatch
from worker.protocol import PromptLogprobs, TokenLogprobs

ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Target:
    """A token of a prompt whose log-probability is wanted."""

    seq_id: int
    row: int  # of the hidden states: the one before it
    token_id: int
    num_best: int


@dataclass(frozen=True, slots=True)
class ScoredTargets:
    """The log-probabilities of a step's targets, on their way to the host."""

    targets: Sequence[Target]
    readback: Readback  # as `Kernels.token_logprobs` returns them, and their ranks

    def read(self) -> tuple[tuple[PromptLogprobs, ...], frozenset[int]]:
        """Wait for them; return them by sequence, and the sequences that have one that is NaN."""
        chosen, best_ids, best, ranks = (one.tolist() for one in self.readback.read())
        by_sequence: dict[int, list[TokenLogprobs]] = {}
        failed: set[int] = set()
        rows = zip(self.targets, chosen, best_ids, best, ranks, strict=True)
        for target, logprob, ids, values, rank in rows:
            top = list(zip(ids, values, strict=True))[: target.num_best]
            of_target = logprob, tuple((i, value) for i, value in top if value != -torch.inf), rank
            by_sequence.setdefault(target.seq_id, []).append(of_target)
            if logprob != logprob:
                failed.add(target.seq_id)
        scored = (
            PromptLogprobs(seq_id, tuple(entries))
            for seq_id, entries in by_sequence.items()
            if seq_id not in failed
        )
        return tuple(scored), frozenset(failed)


class PromptScorer:
    """Takes final hidden states through the head; every rank must, rank 0 looks at the logits."""

    def __init__(self, model: Model, bank: AdapterBank, kernels: AnyKernels) -> None:
        self._model = model
        self._bank = bank
        self._kernels = kernels
        # Hears the whole logits [R, V] that targets are scored by, in the order of targets.
        self.watch: Callable[[Tensor], None] | None = None

    def score(
        self, hidden_RH: Tensor, rows: InputBatch, targets: Sequence[Target]
    ) -> ScoredTargets | None:
        """Return the log-probabilities of targets on rank 0, None elsewhere.

        Args:
            hidden_RH: of the batch's `hidden_rows`, as the final norm leaves them.
            rows: the batch.
            targets: at least one.
        """
        heads = self._bank.heads(rows.runs)
        scored: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for first in range(0, len(targets), ROWS_AT_ONCE):
            some = targets[first : first + ROWS_AT_ONCE]
            index = self._kernels.send([one.row for one in some], torch.int64, hidden_RH.device)
            of_batch = [rows.hidden_rows[one.row] for one in some]
            part = self._model.hidden_logits(hidden_RH[index], of_batch, heads)
            logits = self._model.row_logits(part).whole()
            if logits is not None:
                if self.watch is not None:
                    self.watch(logits)
                scored.append(self._logprobs(logits, some))
        if not scored:
            return None
        chosen, best_ids, best, ranks = zip(*scored, strict=True)
        num_best = max(one.shape[1] for one in best)
        columns = (
            torch.cat(chosen),
            torch.cat([F.pad(one, (0, num_best - one.shape[1])) for one in best_ids]),
            torch.cat([F.pad(one, (0, num_best - one.shape[1]), value=-torch.inf) for one in best]),
            torch.cat(ranks),
        )
        return ScoredTargets(targets, self._kernels.start_readback(columns, hidden_RH.device))

    def _logprobs(
        self, logits_RV: Tensor, targets: Sequence[Target]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        token_ids = self._kernels.send(
            [one.token_id for one in targets], torch.int64, logits_RV.device
        )
        counts = [one.num_best for one in targets]
        found = self._kernels.token_logprobs(logits_RV, range(len(targets)), token_ids, counts)
        own = logits_RV.gather(1, token_ids[:, None])
        return *found, (logits_RV >= own).sum(dim=1)
