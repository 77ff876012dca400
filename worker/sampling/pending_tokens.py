"""The tokens of the last step, for a plan that was made while they were drawn.

Owns what `DRAWN` stands for on each rank's device. Only rank 0 draws; the others are told on their
devices when a plan asks for a token. Knows nothing of logits or of what a plan looks like.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import AnyKernels
from worker.distributed.communicator import Communicator
from worker.sampling.sampler import DrawnRows


class DrawnTokens:
    """What each sequence drew in the last step; all ranks must be told of the same steps.

    A sequence without a token has ended. It may be computed once more all the same, from token 0.
    """

    def __init__(self, group: Communicator, kernels: AnyKernels, device: torch.device) -> None:
        self._group = group
        self._kernels = kernels
        self._device = device
        self._place_by_sequence: dict[int, int] = {}
        self._rows: DrawnRows | None = None

    def note(self, seq_ids: Sequence[int], rows: DrawnRows | None) -> None:
        """Learn which sequences have drawn in a step; what the one before drew is forgotten.

        `rows` are theirs in this order; None on other ranks than 0, and if nobody drew.
        """
        self._place_by_sequence = {seq_id: place for place, seq_id in enumerate(seq_ids)}
        self._rows = rows

    def of(self, seq_ids: Sequence[int]) -> Tensor | None:
        """Return the tokens [n] int64 of sequences on the device; None of no sequence.

        One sum over the ranks, and the host does not wait for it.
        """
        places = [self._place(seq_id) for seq_id in seq_ids]
        if not places:
            return None
        if self._rows is None:
            token_ids = torch.zeros(len(places), dtype=torch.int64, device=self._device)
        else:
            token_ids = self._rows.token_ids
            if places != list(range(len(token_ids))):
                there = self._kernels.send(places, torch.int64, self._device)
                token_ids = token_ids.index_select(0, there)
            token_ids = token_ids.clamp(min=0)
        if self._group.size == 1:
            return token_ids
        return self._group.all_reduce(token_ids.float()).to(torch.int64)

    def told(self, seq_id: int) -> int:
        """Return the token of a sequence on rank 0; waits for the last step."""
        assert self._rows is not None, "only rank 0 draws"
        return max(0, int(self._rows.fetched.read()[0][self._place(seq_id)]))

    def _place(self, seq_id: int) -> int:
        assert seq_id in self._place_by_sequence, f"sequence {seq_id} drew nothing in the last step"
        return self._place_by_sequence[seq_id]
