"""The logits of the rows that a step samples, of which each rank has its part of the vocabulary.

Owns how parts are put together on rank 0: whole, or only the best of each row, which is all that a
greedy token needs. Knows nothing of how a token is drawn.

Shapes: S rows that are sampled, V vocabulary entries of this rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import AnyKernels
from worker.distributed.communicator import Communicator

MAX_VOCABULARY = 2**24  # token ids up to here are exact in float32

Best = tuple[Tensor, Tensor]  # what `Kernels.best` returns


class RowLogits:
    """One rank's part. All ranks ask for the same, in the same order."""

    def __init__(
        self,
        part_SV: Tensor,
        widths: Sequence[int],
        group: Communicator,
        kernels: AnyKernels,
        best: Best | None = None,
    ) -> None:
        """Take a part.

        Args:
            part_SV: [S, V] float32.
            widths: V of every rank; together at most `MAX_VOCABULARY`.
            group: of the ranks.
            kernels: of this rank.
            best: what `Kernels.best` says of the part, if it is known already.
        """
        self.part = part_SV
        self._widths = widths
        self._group = group
        self._kernels = kernels
        self._best = best

    def best(self) -> Best | None:
        """Return the largest of each row [S] and its token [S] on rank 0, None elsewhere.

        Of equals the lowest id; NaN is larger than all.
        """
        values, ids = self._best or self._kernels.best(self.part)
        if self._group.size == 1:
            return values, ids
        first = sum(self._widths[: self._group.rank])
        told = torch.stack((values, (ids + first).float()), dim=1)
        by_rank = self._group.gather_first(told, [2] * self._group.size)
        if by_rank is None:
            return None
        by_rank = by_rank.view(-1, self._group.size, 2)
        # The lower rank has the lower ids.
        values, ranks = self._kernels.best(by_rank[:, :, 0].contiguous())
        return values, by_rank[:, :, 1].gather(1, ranks[:, None])[:, 0].to(torch.int64)

    def whole(self) -> Tensor | None:
        """Return all ranks' logits [S, vocabulary] float32 on rank 0, None elsewhere."""
        return self._group.gather_first(self.part, self._widths)
