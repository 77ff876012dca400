"""Attention of one new row of each sequence over its pages, the context cut into splits.

The cut depends on a sequence's own length alone, so that a row has the same bits in any batch.

Shapes: T rows, S sequences, P pages, HQ / HK heads, G = HQ / HK, D head_dim.
"""

import torch
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
from kernels.gpu.dependent_launch import dependent_options, start_dependents, wait_for_prior

# Positions of a split, multiples of every page size: few sequences of short contexts would leave
# most of a GPU idle if splits were long, and many of long ones are read faster by long splits.
_SHORT_SPLIT = tl.constexpr(128)
_LONG_SPLIT = tl.constexpr(512)
_WANTED_SPLITS = tl.constexpr(8)  # splits are short until there are so many, and then grow
_MOST_SPLITS = tl.constexpr(64)  # above these, long splits grow, too
_MERGED_AT_ONCE = tl.constexpr(16)
_DOT_ROWS = 16  # the fewest rows that tensor cores multiply


def num_splits(context_len: int) -> int:
    """Return how many splits a sequence of so many positions is cut into."""
    return -(-context_len // _positions_of_split(context_len))


def most_splits(context_len: int) -> int:
    """Return the most splits of any sequence of at most so many positions."""
    whole = [_SHORT_SPLIT.value * _WANTED_SPLITS.value, _LONG_SPLIT.value * _MOST_SPLITS.value]
    return max(num_splits(length) for length in (context_len, *whole) if length <= context_len)


def _positions_of_split(context_len: int) -> int:
    """Return the positions of a split of a sequence; `_split_size` is its twin on the device."""
    short, long = _SHORT_SPLIT.value, _LONG_SPLIT.value
    wanted: int = short * max(1, -(-context_len // (short * _WANTED_SPLITS.value)))
    grown: int = long * max(1, -(-context_len // (long * _MOST_SPLITS.value)))
    return min(wanted, grown)


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    scale: float,
    out: Tensor,
    max_splits: int,
    window: int = 0,
    sinks: Tensor | None = None,
) -> None:
    """Write softmax(scale q k) v of each sequence's last row.

    Flash-Decoding: grid (S, HK, max_splits), one program for the G heads that share a KV head, over
    one split; programs past a sequence's own splits end at once. A sequence of one split is done
    with that. Of others each split leaves acc_i, its sum of weighted V, its greatest score m_i and
    the sum of its weights t_i, and a second kernel, grid (S, HQ), adds them up in order:
    sum_i w_i acc_i / sum_i w_i t_i with w_i = 2^(scale (m_i - max m)). Of sharp scores a log of
    the weights would have too few digits in float32. A turn takes one page, whose id the turn
    before has loaded: with ids loaded where they are used, Triton would not fetch K and V ahead of
    their use.

    Args:
        q: [T, HQ, D] float32, float16 or bfloat16; rows and heads may be strided.
        k_pages: [P, HK, page, D] contiguous, q's dtype; page 16, 32, 64 or 128.
        v_pages: likewise.
        rows: [S] int32, the row of `q` and `out` that is the last position of each sequence.
        page_table: [S, max_pages] int32; what lies past a sequence's pages is not read.
        context_lens: [S] int32, the row itself included; 0: nothing is read or written.
        scale: multiplies the scores; positive.
        out: [T, HQ, D] contiguous, q's dtype, written at `rows` only.
        max_splits: at least `most_splits` of the longest context; changes no bit.
        window: positions that a row sees, its own the last; 0: all. Splits before it end at once.
        sinks: [HQ] float32, for each head a score that joins the softmax and has no V, in the
            first split that does not end at once; None: there is none.
    """
    num_sequences, num_heads, head_dim = rows.shape[0], q.shape[1], q.shape[2]
    _, num_kv_heads, page_size, _ = k_pages.shape
    group = num_heads // num_kv_heads
    assert k_pages.is_contiguous() and v_pages.is_contiguous(), "pages must be contiguous"
    assert out.is_contiguous() and q.stride(2) == 1 and page_table.stride(1) == 1
    assert scale > 0, "the greatest score is looked for before the scale is applied"
    if num_sequences == 0 or max_splits == 0:
        return
    # Planes of one split are never used: their sequence writes `out` itself.
    num_planes = max_splits if max_splits > 1 else 0
    shape = (num_planes, num_sequences, num_heads)
    part_acc = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    part_weights = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)  # m_i, t_i
    _attend_split[(num_sequences, num_kv_heads, max_splits)](
        q,
        k_pages,
        v_pages,
        rows,
        page_table,
        context_lens,
        out,
        part_acc,
        part_weights,
        sinks,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_HEADS=max(_DOT_ROWS, triton.next_power_of_2(group)),
        PAGE=page_size,
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        TILE=tile_positions(page_size, head_dim, q.itemsize),
        WINDOW=window,
        HAS_SINKS=sinks is not None,
        num_warps=4,
        num_stages=2,
        **dependent_options(),
    )
    if max_splits > 1:
        _merge_splits[(num_sequences, num_heads)](
            part_acc,
            part_weights,
            rows,
            context_lens,
            out,
            scale * LOG2_E,
            HEAD_DIM=head_dim,
            DIM_BLOCK=triton.next_power_of_2(head_dim),
            WINDOW=window,
            num_warps=2,
            **dependent_options(),
        )


@triton.jit
def _split_size(length):
    """Return the positions of one split of a sequence; `_positions_of_split` is its twin."""
    wanted = _SHORT_SPLIT * tl.maximum(1, tl.cdiv(length, _SHORT_SPLIT * _WANTED_SPLITS))
    grown = _LONG_SPLIT * tl.maximum(1, tl.cdiv(length, _LONG_SPLIT * _MOST_SPLITS))
    return tl.minimum(wanted, grown)


# Batches differ in these, and a kernel of its own for each kind would be compiled while they wait.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "table_ptr", "lengths_ptr"],
)
def _attend_split(
    q_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    part_acc_ptr,
    part_weights_ptr,
    sinks_ptr,
    scale,
    row_stride,
    head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_dependents()
    length = tl.load(lengths_ptr + sequence)
    size = _split_size(length)
    first = split * size
    end = tl.minimum(first + size, length)
    seen = 0
    if WINDOW > 0:
        seen = tl.maximum(length - WINDOW, 0)  # the first position that is
        first = tl.maximum(first, seen // TILE * TILE)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    table_ptr += sequence.to(tl.int64) * table_stride
    page = tl.load(table_ptr + first // PAGE, mask=first < end, other=0)
    wait_for_prior()
    if (first >= end) | (end <= seen):
        return

    heads, dims = tl.arange(0, BLOCK_HEADS), tl.arange(0, DIM_BLOCK)
    in_group = heads < GROUP
    is_there = in_group[:, None]
    if DIM_BLOCK > HEAD_DIM:
        is_there = is_there & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + heads
    q_pointers = q_ptr + row * row_stride + heads[:, None] * head_stride + dims[None, :]
    q = tl.load(q_pointers, mask=is_there, other=0.0)
    begins = in_group & (tl.zeros_like(heads) + first <= seen)  # no split before it has a part
    largest, total = begin_rows(sinks_ptr, heads, begins, scale, HAS_SINKS, BLOCK_HEADS)
    acc = tl.zeros((BLOCK_HEADS, DIM_BLOCK), tl.float32)
    for start in range(first, end, TILE):
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
        is_seen = start + tl.arange(0, TILE) < end
        if WINDOW > 0:
            is_seen &= start + tl.arange(0, TILE) >= seen
        scores = tl.where(is_seen[None, :], scores, -float("inf"))
        largest, total, acc = fold_tile(scores, v, largest, total, acc, scale)
        page = next_page

    # Decided by the length, not by max_splits: the same sequence never takes the other way.
    if size >= length:
        out_pointers = out_ptr + (row * NUM_KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM
        acc = acc * tl.div_rn(1.0, total)[:, None]
        out_value = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_pointers + dims[None, :], out_value, mask=is_there)
    else:
        plane = split.to(tl.int64) * tl.num_programs(0) + sequence
        parts = plane * (NUM_KV_HEADS * GROUP) + heads
        tl.store(part_weights_ptr + 2 * parts, largest, mask=in_group)
        tl.store(part_weights_ptr + 2 * parts + 1, total, mask=in_group)
        part_pointers = part_acc_ptr + parts[:, None] * HEAD_DIM + dims[None, :]
        tl.store(part_pointers, acc, mask=is_there)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "lengths_ptr"])
def _merge_splits(
    part_acc_ptr,
    part_weights_ptr,
    rows_ptr,
    lengths_ptr,
    out_ptr,
    scale,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    num_sequences, num_heads = tl.num_programs(0), tl.num_programs(1)
    start_dependents()
    length = tl.load(lengths_ptr + sequence)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    size = _split_size(length)
    wait_for_prior()
    if length <= size:  # empty, or done already
        return
    count = tl.cdiv(length, size)
    skipped = tl.maximum(length - WINDOW, 0) // size if WINDOW > 0 else 0
    plane_size = num_sequences.to(tl.int64) * num_heads
    first_part = sequence * num_heads.to(tl.int64) + head

    splits, dims = tl.arange(0, _MOST_SPLITS), tl.arange(0, DIM_BLOCK)
    is_split = (splits >= skipped) & (splits < count)
    weight_ptrs = part_weights_ptr + 2 * (splits * plane_size + first_part)
    peaks = tl.load(weight_ptrs, mask=is_split, other=-float("inf"))
    largest = tl.max(peaks, 0)
    totals = tl.load(weight_ptrs + 1, mask=is_split, other=0.0)
    total = tl.sum(totals * tl.exp2((peaks - largest) * scale), 0)
    acc = tl.zeros((DIM_BLOCK,), tl.float32)
    for start in range(0, count, _MERGED_AT_ONCE):
        some = start + tl.arange(0, _MERGED_AT_ONCE)
        parts = some * plane_size + first_part
        is_part = (some >= skipped) & (some < count)
        peak = tl.load(part_weights_ptr + 2 * parts, mask=is_part, other=-float("inf"))
        part_pointers = part_acc_ptr + parts[:, None] * HEAD_DIM + dims[None, :]
        is_there = is_part[:, None]
        if DIM_BLOCK > HEAD_DIM:
            is_there = is_there & (dims < HEAD_DIM)[None, :]
        part = tl.load(part_pointers, mask=is_there, other=0.0)
        acc += tl.sum(part * tl.exp2((peak - largest) * scale)[:, None], 0)
    out_pointers = out_ptr + (row * num_heads + head) * HEAD_DIM + dims
    out_value = tl.div_rn(acc, total).to(out_ptr.dtype.element_ty)
    if DIM_BLOCK > HEAD_DIM:
        tl.store(out_pointers, out_value, mask=dims < HEAD_DIM)
    else:
        tl.store(out_pointers, out_value)
