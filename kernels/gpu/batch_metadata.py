"""What the GPU's kernels want to know of a batch: where K, V and states lie, and whose LoRA it is.

The tensors may be larger than a batch, so that a CUDA graph can be replayed with the next one, and
then say which places are empty.

Shapes: T rows, S sequences that decode, C that prefill, W pages of the widest page table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.recurrent.state_runs import StateRun


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The rows of a batch in the KV pages."""

    positions: Tensor  # [T] int64
    kv_loc: Tensor  # [T] int64: page * page_size + offset; -1 where there is no row
    decode_rows: Tensor  # [S] int32: the row of each sequence that decodes
    decode_lens: Tensor  # [S] int32: its positions, that row included; 0 where there is none
    decode_table: Tensor  # [S, W] int32: its pages
    max_splits: int  # of the longest of them
    prefill_blocks: Tensor  # [blocks, 4] int32, see kernels.gpu.attention.paged_prefill
    prefill_table: Tensor  # [C, W] int32


@dataclass(frozen=True, slots=True)
class LoraMetadata:
    """The rows of a batch that have a LoRA of one fused linear."""

    tiles: Tensor  # [tiles, 3] int32 (slot, first row, end row)
    shares: Tensor  # [NUM_SHARES + 1, 4] int32, see kernels.gpu.lora.apply.share_tiles
    table: Tensor  # [slots, 5 + 3 modules] int64, see kernels.gpu.lora.apply
    widths: tuple[int, ...]  # output features of each module
    dtype: torch.dtype  # of A and B
    max_lora_rank: int  # stacked, of any slot that a tile names


@dataclass(frozen=True, slots=True)
class ExpertLoraMetadata:
    """The rows of a batch, and the LoRAs of one fused linear of experts."""

    row_slots: Tensor  # [T] int32: the slot of each row's adapter, or -1
    table: Tensor  # [slots, experts, 5 + 3 modules] int64, see kernels.gpu.lora.apply
    widths: tuple[int, ...]  # output features of each module
    dtype: torch.dtype  # of A and B
    max_lora_rank: int  # stacked, of any expert of a slot that a row has


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """The rows of a batch whose sequences have states."""

    runs: Tensor  # [runs, 4] int32 (first row, end row, page, is new); no rows where there is none
    row_runs: Tensor  # [T] int32: the number of each row's run; -1 where there is no row


def state_numbers(
    num_rows: int, runs: Sequence[StateRun]
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Return the numbers of a `StateMetadata` of T rows."""
    row_runs = [-1] * num_rows
    for index, run in enumerate(runs):
        row_runs[run.start : run.stop] = [index] * (run.stop - run.start)
    return [(run.start, run.stop, run.page, int(run.is_new)) for run in runs], row_runs
