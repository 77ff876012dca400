"""How rows of logits are drawn from, on its way to a GPU: sent once for as long as it stays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.gpu.async_copy import send_columns
from kernels.sampling import RECORD, RowDraws, RowSampling


@dataclass(frozen=True, slots=True)
class _Sent:
    """How a step's rows were drawn, and where that is on the device."""

    rows: Sequence[int]
    draws: RowDraws


class DrawsSender:
    """Sends the draws of each step."""

    def __init__(self) -> None:
        self._last: _Sent | None = None

    def send(
        self,
        rows: Sequence[int],
        draws: Sequence[RowSampling],
        positions: Sequence[int],
        device: torch.device,
    ) -> RowDraws:
        """See `send_draws` of `kernels.interface.Kernels`."""
        last, ids = self._last, np.array(positions, np.int64)
        if last is not None and rows == last.rows and draws == last.draws.draws:
            # As in most steps: all that has changed is where the tokens come.
            (places,) = send_columns((ids,), device)
            columns = (*last.draws.columns[:-1], places)
            return replace(last.draws, positions=positions, columns=columns)
        records = np.frombuffer(b"".join([draw.record for draw in draws]), RECORD)
        row_ids, *sent = send_columns(
            (
                np.array(rows, np.int64),
                records["temperature"],
                records["top_k"],
                records["top_p"],
                records["min_p"],
                records["seed"].view(np.int64),
                ids,
            ),
            device,
        )
        made = RowDraws(row_ids, draws, positions, tuple(sent))
        self._last = _Sent(rows, made)
        return made
