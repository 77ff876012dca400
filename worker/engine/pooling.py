"""What prompts are pooled to, made of final hidden states as the chunks of a prompt are computed.

An embedding as sentence-transformers makes it: the last token's state, or the mean of all. The sum
behind a mean is made page by page: chunks of a prompt that is computed from its start end at pages,
so its bits do not depend on how it is cut. Or the logits of a classification head behind the last
token, each prompt's by itself and each label's as one sum, so that company changes no bit.

Shapes: R rows of which the hidden states are wanted, H hidden, N labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AnyKernels, Readback
from worker.protocol import Chunk, PooledPrompt, Pooling


@dataclass(frozen=True, slots=True)
class PoolingChunk:
    """A chunk of a prompt that is pooled, with what it is pooled of."""

    chunk: Chunk
    pooling: Pooling
    hidden: Tensor  # [R, H] of all its tokens, for a mean, or of its last
    head: Tensor | None  # [N, H] float32, to classify by


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The prompts that a step has completed, on their way to the host."""

    sizes: Sequence[tuple[int, int]]  # (sequence, H or N)
    readback: Readback  # of all their numbers, one after the other, float32

    def read(self) -> tuple[tuple[PooledPrompt, ...], frozenset[int]]:
        """Wait for them; return them, and the sequences that have a number that is not finite."""
        pooled: list[PooledPrompt] = []
        failed: set[int] = set()
        (together,) = self.readback.read()
        end = 0
        for seq_id, size in self.sizes:
            values = together[end : end + size]
            end += size
            if bool(values.isfinite().all()):
                pooled.append(PooledPrompt(seq_id, values.numpy().astype("<f4").tobytes()))
            else:
                failed.add(seq_id)
        return tuple(pooled), frozenset(failed)


class PromptPooler:
    """Sums of hidden states by sequence, until its prompt is whole. Rank 0's."""

    def __init__(self, page_size: int, kernels: AnyKernels) -> None:
        self._page_size = page_size
        self._kernels = kernels
        self._sums: dict[int, Tensor] = {}  # [H] float32, of those whose mean is wanted

    def end(self, seq_id: int) -> None:
        """Forget a sequence, if it is known: one that comes back begins anew."""
        self._sums.pop(seq_id, None)

    def pool(self, chunks: Sequence[PoolingChunk]) -> PooledRows | None:
        """Take in the states of a step's chunks, in plan order; return what is whole, if any is."""
        whole: dict[int, Tensor] = {}
        for one in chunks:
            chunk, rows = one.chunk, one.hidden.float()
            if one.pooling == "mean":
                self._add(chunk, rows)
            if chunk.samples:
                whole[chunk.seq_id] = self._whole(one, rows)
        if not whole:
            return None
        together = torch.cat(tuple(whole.values()))
        sizes = [(seq_id, len(values)) for seq_id, values in whole.items()]
        return PooledRows(sizes, self._kernels.start_readback((together,), together.device))

    def _whole(self, one: PoolingChunk, rows: Tensor) -> Tensor:
        """Return what a prompt has become by its last chunk."""
        match one.pooling:
            case "mean":
                num_tokens = one.chunk.start + len(one.chunk.token_ids)
                return self._sums.pop(one.chunk.seq_id) / num_tokens
            case "classify":
                assert one.head is not None, f"no head to classify {one.chunk.seq_id} by"
                return (one.head * rows[0]).sum(1)
        return rows[0]

    def _add(self, chunk: Chunk, rows: Tensor) -> None:
        assert chunk.start % self._page_size == 0, "a mean is of prompts computed from their start"
        if chunk.start == 0:
            self._sums[chunk.seq_id] = torch.zeros_like(rows[0])
        total = self._sums[chunk.seq_id]
        for first in range(0, len(rows), self._page_size):
            total += rows[first : first + self._page_size].sum(0)
