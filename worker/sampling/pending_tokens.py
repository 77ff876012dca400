"""The tokens that the last step has sampled, on the device, for the step that is planned meanwhile.

Such a plan has `PENDING_TOKEN` where a token is not known yet. Rank 0 alone samples; the other
ranks get the tokens by an all-reduce between devices when a plan needs them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from worker.distributed.communicator import Communicator
from worker.sampling.sampler import SampledRows


class PendingTokens:
    """The token of each sequence that the last step sampled; the same calls on every rank.

    A sequence whose logits were not finite has no token. It may be computed once more all the same,
    from token 0.
    """

    def __init__(self, group: Communicator, kernels: AnyKernels, device: torch.device) -> None:
        self._group = group
        self._kernels = kernels
        self._device = device
        self._seq_ids: Sequence[int] = ()  # by row
        self._row_by_sequence: dict[int, int] = {}  # empty until a row is looked for
        self._rows: SampledRows | None = None

    def put(self, seq_ids: Sequence[int], rows: SampledRows | None) -> None:
        """Keep what a step samples, in place of the tokens of the step before.

        `rows` are those of `seq_ids` in this order, which nobody changes; None on other ranks than
        0, or of no sequence.
        """
        self._seq_ids, self._rows = seq_ids, rows
        self._row_by_sequence = {}

    def on_device(self, seq_ids: Sequence[int]) -> Tensor | None:
        """Return the tokens [n] int64 of sequences on the device; None of no sequence.

        One all-reduce, and the host does not wait for it.
        """
        if not seq_ids:
            return None
        is_all = seq_ids == self._seq_ids  # as in most steps: no row has to be looked for
        rows = () if is_all else self._rows_of(seq_ids)
        if self._rows is None:
            token_ids = torch.zeros(len(seq_ids), dtype=torch.int64, device=self._device)
        else:
            token_ids = self._rows.token_ids
            if not is_all:
                index = self._kernels.send(rows, torch.int64, self._device)
                token_ids = token_ids.index_select(0, index)
            token_ids = token_ids.clamp(min=0)
        if self._group.size == 1:
            return token_ids
        return self._group.all_reduce(token_ids.float()).to(torch.int64)

    def on_host(self, seq_id: int) -> int:
        """Return the token of a sequence on rank 0; waits for the last step."""
        assert self._rows is not None, "only rank 0 samples"
        return max(0, int(self._rows.readback.read()[0][self._rows_of((seq_id,))[0]]))

    def _rows_of(self, seq_ids: Sequence[int]) -> list[int]:
        """Return the row that each of some sequences, at least one, had in the last step."""
        if not self._row_by_sequence:
            self._row_by_sequence = {seq_id: row for row, seq_id in enumerate(self._seq_ids)}
        rows = [self._row_by_sequence.get(seq_id, -1) for seq_id in seq_ids]
        assert min(rows) >= 0, (
            f"sequence {seq_ids[rows.index(-1)]} sampled nothing in the last step"
        )
        return rows
