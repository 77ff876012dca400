"""One step's rows as tensors.

Owns the order of rows: sequences of one adapter slot stand together, the base model's first, so
that every adapter is one run of rows. Kernels are batch-invariant, so the order changes no result.
Knows nothing of layers.

Shapes: T rows, S sampled rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from worker.adapter_bank import SlotRows
from worker.protocol import Chunk
from worker.sequences import SequenceTable


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """What the forward pass works on."""

    token_ids: Tensor  # [T] int64
    attention: AttentionBatch
    runs: tuple[SlotRows, ...]  # rows of each adapter; rows in none are the base model's
    sample_rows: Tensor  # [S] int64: the last row of each chunk that samples, in plan order


def build_batch(
    chunks: Sequence[Chunk], table: SequenceTable, page_size: int, device: torch.device
) -> DeviceBatch:
    """Lay out the chunks of a plan whose effect is in the table already; at least one chunk."""
    slots = [table[chunk.seq_id].slot for chunk in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (-1 if (s := slots[i]) is None else s, i))
    ordered = [chunks[i] for i in order]
    sequences = [table[chunk.seq_id] for chunk in ordered]
    bounds = list(accumulate((len(chunk.token_ids) for chunk in ordered), initial=0))
    last_row = {chunk.seq_id: stop - 1 for chunk, stop in zip(ordered, bounds[1:], strict=True)}
    attention = AttentionBatch.build(
        query_starts=bounds,
        context_lens=[sequence.num_tokens for sequence in sequences],
        page_tables=[sequence.pages for sequence in sequences],
        page_size=page_size,
        device=device,
    )
    token_ids = [token_id for chunk in ordered for token_id in chunk.token_ids]
    return DeviceBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        attention=attention,
        runs=_runs([slots[i] for i in order], bounds),
        sample_rows=torch.tensor(
            [last_row[chunk.seq_id] for chunk in chunks if chunk.samples],
            dtype=torch.int64,
            device=device,
        ),
    )


def _runs(slots: Sequence[int | None], bounds: Sequence[int]) -> tuple[SlotRows, ...]:
    """Join neighbouring sequences of one slot."""
    runs: list[SlotRows] = []
    for slot, start, stop in zip(slots, bounds, bounds[1:], strict=False):
        if slot is None:
            continue
        if runs and runs[-1].slot == slot:
            runs[-1] = SlotRows(slot, runs[-1].start, stop)
        else:
            runs.append(SlotRows(slot, start, stop))
    return tuple(runs)
