"""Causal attention of runs of rows over their sequences' pages.

The cut of a step's rows into blocks decides speed only: every row is summed from its sequence's
first page on, tile by tile, whatever block it lies in.

Shapes: T rows, N blocks, S sequences, P pages, HQ / HK heads, G = HQ / HK, D head_dim.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention.online_softmax import (
    LOG2_E,
    begin_rows,
    fold_tile,
    load_tile,
    tile_positions,
)
from kernels.gpu.constants import LAUNCH_OPTIONS

_MAX_HEAD_DIM = 256


def _dot_rows(head_dim: int) -> int:
    """Return query rows times heads of a program: the most whose sums fit the registers."""
    assert head_dim <= _MAX_HEAD_DIM, "sums of more dimensions do not fit the registers"
    return 128 if head_dim <= 128 else 64  # 64 to a warp group, or its share of two


def block_rows(group: int, head_dim: int) -> int:
    """Return how many rows of one sequence one program takes, with `group` heads of each."""
    return max(1, _dot_rows(head_dim) // group)


def cut_prefill(
    first_rows: Sequence[int],
    num_rows: Sequence[int],
    context_lens: Sequence[int],
    rows_each: int,
) -> list[tuple[int, int, int, int]]:
    """Cut each sequence's rows into blocks, those that read the most positions first.

    Args:
        first_rows: where each sequence's rows begin in q and out.
        num_rows: of each sequence; 0: it has no block.
        context_lens: positions of each sequence up to its last row, that included.
        rows_each: rows of a block, from `block_rows`.

    Returns:
        (sequence index, first row, rows, position of the first row) of each block.
    """
    blocks = []
    runs = zip(first_rows, num_rows, context_lens, strict=True)
    for sequence, (first_row, count, context_len) in enumerate(runs):
        position = context_len - count
        for done in range(0, count, rows_each):
            rows = min(rows_each, count - done)
            blocks.append((sequence, first_row + done, rows, position + done))
    # Programs start in this order: a long one that starts last would keep the GPU waiting.
    blocks.sort(key=lambda block: (-(block[2] + block[3]), block[0], block[1]))
    return blocks


def paged_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    scale: float,
    out: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
) -> None:
    """Write softmax(scale q k) v of each row, over its sequence's positions up to its own.

    FlashAttention-2 with rows and grouped heads packed into one tile: grid (N HK), all heads of the
    first block first. Positions that every row of the block sees are folded without masks, then
    those at the diagonal with them; either way rounds alike (kernels.gpu.attention.online_softmax).
    Page ids are carried from turn to turn, as in decode.

    Args:
        q: [T, HQ, D] float16 or bfloat16, or float32, for which there are no matrix instructions
            of enough digits: right, but slow; rows and heads may be strided.
        k_pages: [P, HK, page, D] contiguous, q's dtype, finite at every position up to the rows'
            own; page 16, 32, 64 or 128.
        v_pages: likewise.
        blocks: [N, 4] int32, as `cut_prefill` made them; one of 0 rows does nothing.
        page_table: [S, max_pages] int32; what lies past a sequence's pages is not read.
        scale: multiplies the scores; positive.
        out: [T, HQ, D] contiguous, q's dtype, written at the blocks' rows only.
        window: positions that a row sees, its own the last; 0: all. Tiles before the first row's
            are not read; then all are masked.
        sinks: [HQ] float32, for each head a score that joins the softmax and has no V; None: there
            is none.
    """
    num_heads, head_dim = q.shape[1], q.shape[2]
    _, num_kv_heads, page_size, _ = k_pages.shape
    group = num_heads // num_kv_heads
    assert k_pages.is_contiguous() and v_pages.is_contiguous(), "pages must be contiguous"
    assert out.is_contiguous() and q.stride(2) == 1 and page_table.stride(1) == 1
    assert blocks.is_contiguous(), "blocks must be contiguous"
    assert scale > 0, "the greatest score is looked for before the scale is applied"
    if blocks.shape[0] == 0:
        return
    rows_each = block_rows(group, head_dim)
    _attend_block[(blocks.shape[0] * num_kv_heads,)](
        q,
        k_pages,
        v_pages,
        blocks,
        page_table,
        out,
        sinks,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK=max(_dot_rows(head_dim), triton.next_power_of_2(rows_each * group)),
        PAGE=page_size,
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        TILE=tile_positions(page_size, head_dim, q.itemsize),
        WINDOW=window,
        HAS_SINKS=sinks is not None,
        num_warps=8,
        num_stages=3,
        **LAUNCH_OPTIONS,
    )


# Batches differ in these, and a kernel of its own for each kind would be compiled while they wait.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["blocks_ptr", "table_ptr"],
)
def _attend_block(
    q_ptr,
    k_ptr,
    v_ptr,
    blocks_ptr,
    table_ptr,
    out_ptr,
    sinks_ptr,
    scale,
    row_stride,
    head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    blocks_ptr += tl.program_id(0) // NUM_KV_HEADS * 4
    sequence, first_row = tl.load(blocks_ptr), tl.load(blocks_ptr + 1)
    num_rows, first_position = tl.load(blocks_ptr + 2), tl.load(blocks_ptr + 3)
    if num_rows == 0:
        return
    table_ptr += sequence.to(tl.int64) * table_stride
    # Of the tiles that every row sees whole: none where windows begin at different positions.
    end_seen = (first_position + 1) // TILE * TILE
    if WINDOW > 0:
        end_seen = tl.maximum(first_position + 1 - WINDOW, 0) // TILE * TILE
    page = tl.load(table_ptr + (end_seen // PAGE if WINDOW > 0 else 0))

    # What may pass 2^31 is one number for the block: registers are short at the end of the loops.
    q_ptr += first_row.to(tl.int64) * row_stride + kv_head * GROUP * head_stride
    out_ptr += (first_row.to(tl.int64) * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM)
    at, dims = tl.arange(0, BLOCK), tl.arange(0, DIM_BLOCK)
    block_row, head = at // GROUP, at % GROUP
    is_row = (block_row < num_rows)[:, None]
    if DIM_BLOCK > HEAD_DIM:
        is_row = is_row & (dims < HEAD_DIM)[None, :]
    q_offsets = block_row * row_stride + head * head_stride
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=is_row, other=0.0)
    is_there = block_row < num_rows
    heads = kv_head * GROUP + head
    largest, total = begin_rows(sinks_ptr, heads, is_there, scale, HAS_SINKS, BLOCK)
    acc = tl.zeros((BLOCK, DIM_BLOCK), tl.float32)

    end = first_position + num_rows
    for start in range(0, 0 if WINDOW > 0 else end_seen, TILE):
        after = start + TILE
        next_page = tl.load(table_ptr + after // PAGE, mask=after < end, other=0)
        k = load_tile(
            k_ptr,
            page,
            kv_head,
            start,
            end,
            NUM_KV_HEADS,
            PAGE,
            HEAD_DIM,
            DIM_BLOCK,
            TILE,
            IS_FULL=True,
        )
        v = load_tile(
            v_ptr,
            page,
            kv_head,
            start,
            end,
            NUM_KV_HEADS,
            PAGE,
            HEAD_DIM,
            DIM_BLOCK,
            TILE,
            IS_FULL=True,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        largest, total, acc = fold_tile(scores, v, largest, total, acc, scale)
        page = next_page
    for start in range(end_seen, end, TILE):
        after = start + TILE
        next_page = tl.load(table_ptr + after // PAGE, mask=after < end, other=0)
        k = load_tile(
            k_ptr,
            page,
            kv_head,
            start,
            end,
            NUM_KV_HEADS,
            PAGE,
            HEAD_DIM,
            DIM_BLOCK,
            TILE,
            IS_FULL=False,
        )
        v = load_tile(
            v_ptr,
            page,
            kv_head,
            start,
            end,
            NUM_KV_HEADS,
            PAGE,
            HEAD_DIM,
            DIM_BLOCK,
            TILE,
            IS_FULL=False,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        is_seen = start + tl.arange(0, TILE)[None, :] <= (first_position + block_row)[:, None]
        if WINDOW > 0:
            passed = (first_position + block_row - WINDOW)[:, None]
            is_seen &= start + tl.arange(0, TILE)[None, :] > passed
        scores = tl.where(is_seen, scores, -float("inf"))
        largest, total, acc = fold_tile(
            scores, v, largest, total, acc, scale, MAY_SEE_NONE=WINDOW > 0
        )
        page = next_page

    acc = acc * tl.div_rn(1.0, total)[:, None]
    out_offsets = (block_row * NUM_KV_HEADS * GROUP + head) * HEAD_DIM
    out_pointers = out_ptr + out_offsets[:, None] + dims[None, :]
    tl.store(out_pointers, acc.to(out_ptr.dtype.element_ty), mask=is_row)
