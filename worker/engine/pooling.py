"""The embeddings of prompts, made of final hidden states as the chunks of a prompt are computed.

As sentence-transformers pools: the last token's state, or the mean of all. The sum behind a mean is
made page by page: chunks of a prompt that is computed from its start end at pages, so its bits do
not depend on how it is cut.

Shapes: R rows of which the hidden states are wanted, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AnyKernels, Readback
from worker.protocol import Chunk, Pooling


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The embeddings that a step has completed, on their way to the host."""

    seq_ids: Sequence[int]
    readback: Readback  # of one tensor [sequences, H] float32

    def read(self) -> dict[int, bytes]:
        """Wait for them; return each as it is sent."""
        (embeddings,) = self.readback.read()
        rows = embeddings.numpy().astype("<f4")
        return {seq_id: rows[i].tobytes() for i, seq_id in enumerate(self.seq_ids)}


class PromptPooler:
    """Sums of hidden states by sequence, until its prompt is whole. Rank 0's."""

    def __init__(self, page_size: int, kernels: AnyKernels) -> None:
        self._page_size = page_size
        self._kernels = kernels
        self._sums: dict[int, Tensor] = {}  # [H] float32, of those whose mean is wanted

    def end(self, seq_id: int) -> None:
        """Forget a sequence, if it is known: one that comes back begins anew."""
        self._sums.pop(seq_id, None)

    def pool(self, chunks: Sequence[tuple[Chunk, Pooling, Tensor]]) -> PooledRows | None:
        """Take in the states of a step; return the embeddings that are whole now, if any.

        Args:
            chunks: those of the step that are pooled, in plan order, each with the states [R, H] of
                all its tokens, for a mean, or of its last.
        """
        whole: dict[int, Tensor] = {}
        for chunk, pooling, hidden_RH in chunks:
            rows = hidden_RH.float()
            if pooling == "mean":
                self._add(chunk, rows)
            if chunk.samples:
                num_tokens = chunk.start + len(chunk.token_ids)
                is_mean = pooling == "mean"
                total = self._sums.pop(chunk.seq_id) if is_mean else rows[0]
                whole[chunk.seq_id] = total / num_tokens if is_mean else total
        if not whole:
            return None
        embeddings = torch.stack(list(whole.values()))
        readback = self._kernels.start_readback((embeddings,), embeddings.device)
        return PooledRows(tuple(whole), readback)

    def _add(self, chunk: Chunk, rows: Tensor) -> None:
        assert chunk.start % self._page_size == 0, "a mean is of prompts computed from their start"
        if chunk.start == 0:
            self._sums[chunk.seq_id] = torch.zeros_like(rows[0])
        total = self._sums[chunk.seq_id]
        for first in range(0, len(rows), self._page_size):
            total += rows[first : first + self._page_size].sum(0)
