"""The logits of the sampled rows, of which each rank has its part of the vocabulary.

Owns how parts are gathered on rank 0: whole, or only the argmax of each row, which is all that a
greedy token needs.

Shapes: S rows that are sampled, V vocabulary entries of this rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from worker.distributed.communicator import Communicator

MAX_VOCABULARY = 2**24  # token ids up to here are exact in float32

Argmax = tuple[Tensor, Tensor]  # the largest of each row [S] and its index [S]


class RowLogits:
    """One rank's part. All ranks ask for the same, in the same order."""

    def __init__(
        self,
        part_SV: Tensor,
        widths: Sequence[int],
        group: Communicator,
        kernels: AnyKernels,
        argmax: Argmax | None = None,
    ) -> None:
        """Take a part.

        Args:
            part_SV: [S, V] float32.
            widths: V of every rank; together at most `MAX_VOCABULARY`.
            group: of the ranks.
            kernels: of this rank.
            argmax: of the part, if it is known already.
        """
        self.part = part_SV
        self._widths = widths
        self._group = group
        self._kernels = kernels
        self._argmax = argmax

    def argmax(self) -> Argmax | None:
        """Return the largest of each row [S] and its token [S] on rank 0, None elsewhere.

        Of equals the lowest id; NaN is larger than all.
        """
        values, ids = self._argmax or self._kernels.argmax(self.part)
        if self._group.size == 1:
            return values, ids
        first = sum(self._widths[: self._group.rank])
        own = torch.stack((values, (ids + first).float()), dim=1)
        by_rank = self._group.gather_first(own, [2] * self._group.size)
        if by_rank is None:
            return None
        by_rank = by_rank.view(-1, self._group.size, 2)
        # The lower rank has the lower ids.
        values, ranks = self._kernels.argmax(by_rank[:, :, 0].contiguous())
        return values, by_rank[:, :, 1].gather(1, ranks[:, None])[:, 0].to(torch.int64)

    def whole(self) -> Tensor | None:
        """Return all ranks' logits [S, vocabulary] float32 on rank 0, None elsewhere."""
        return self._group.gather_first(self.part, self._widths)
