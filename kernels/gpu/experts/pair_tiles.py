"""Pairs of rows and experts in tiles of one adapter and one expert each, for LoRA on a GPU.

Shapes: T rows, P pairs, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts import RoutedRows
from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.gpu.experts.routing import expert_of
from kernels.gpu.lora.apply import TILE_ROWS


def cut_pair_tiles(row_slots: Tensor, routed: RoutedRows) -> Tensor:
    """Return tiles as `kernels.gpu.lora.apply` takes them, (slot E + expert, first pair, end pair).

    There is one for each pair; where no tile begins, it is empty. So the grid does not depend on
    what was routed where.

    Args:
        row_slots: [T] int32, the slot of each row's adapter, or -1.
        routed: of the same rows.

    Returns:
        [P, 3] int32.
    """
    num_pairs, num_experts = routed.num_pairs, routed.starts.shape[0] - 1
    tiles = torch.empty(num_pairs, 3, dtype=torch.int32, device=row_slots.device)
    if num_pairs > 0:
        _pair_tile[(num_pairs,)](
            tiles,
            row_slots,
            routed.rows,
            routed.starts,
            NUM_EXPERTS=num_experts,
            BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
            TILE_ROWS=TILE_ROWS,
            num_warps=1,
            **LAUNCH_OPTIONS,
        )
    return tiles


@triton.jit
def _pair_tile(
    tiles_ptr,
    row_slots_ptr,
    rows_ptr,
    starts_ptr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    pair = tl.program_id(0)
    expert, start, end, _ = expert_of(starts_ptr, pair, 1, NUM_EXPERTS, BLOCK_EXPERTS)
    # Tiles end where one adapter's rows do, and at multiples of their size in an expert's pairs.
    in_tile = (pair - start) % TILE_ROWS
    end = tl.minimum(end, pair - in_tile + TILE_ROWS)
    pairs = pair + tl.arange(0, TILE_ROWS)
    is_pair = pairs < end
    slot = tl.load(row_slots_ptr + tl.load(rows_ptr + pair))
    slots = tl.load(row_slots_ptr + tl.load(rows_ptr + pairs, mask=is_pair, other=0))
    end = tl.min(tl.where(is_pair & (slots == slot), end, tl.minimum(pairs, end)), 0)
    before = tl.load(row_slots_ptr + tl.load(rows_ptr + tl.maximum(pair - 1, 0)))
    is_begin = (in_tile == 0) | (before != slot)
    is_tile = is_begin & (slot >= 0) & (expert < NUM_EXPERTS)
    tl.store(tiles_ptr + 3 * pair, slot * NUM_EXPERTS + expert)
    tl.store(tiles_ptr + 3 * pair + 1, pair)
    tl.store(tiles_ptr + 3 * pair + 2, tl.where(is_tile, end, pair))
