"""The two kernels of LoRA, of tiles of rows of one adapter each, and how they find it.

apply.py chooses grids and sizes.

A table's row says where a slot's A and B lie: [A, lora_rank, gain, shift, 0] and for each module
[B, first lora_rank, lora_rank], addresses as integers.
"""

import triton
import triton.language as tl

from kernels.gpu.dependent_launch import start_dependents, wait_for_prior


@triton.jit
def pointer_at(field_ptr, dtype: tl.constexpr):
    """Read an address on 16 bytes, so that what lies there can be read 16 bytes at a time."""
    return tl.multiple_of(tl.load(field_ptr).to(tl.pointer_type(dtype)), 16)


# Batches differ in these, and a kernel of its own for each kind would be compiled while they wait.
@triton.jit(
    do_not_specialize=["part_stride", "plane_stride"],
    do_not_specialize_on_alignment=["tiles_ptr", "table_ptr"],
)
def shrink_tile(
    x_ptr,
    planes_ptr,
    tiles_ptr,
    table_ptr,
    x_stride,
    part_stride,
    plane_stride,
    FIELDS: tl.constexpr,
    INPUTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """planes[part, rows, ranks] = x[rows, part] A[ranks, part] transposed."""
    start_dependents()
    tile_ptr = tiles_ptr + 3 * tl.program_id(0)
    first_row, end_row = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    # The slot of an empty tile may be anything.
    slot = tl.where(first_row < end_row, tl.load(tile_ptr), 0)
    slot_ptr = table_ptr + slot.to(tl.int64) * FIELDS
    lora_rank = tl.load(slot_ptr + 1)
    a_ptr = pointer_at(slot_ptr, x_ptr.dtype.element_ty)
    wait_for_prior()
    first_rank = tl.program_id(1) * BLOCK_RANKS
    if (first_row >= end_row) | (first_rank >= lora_rank):
        return
    rows = (first_row + tl.arange(0, TILE_ROWS)).to(tl.int64)
    ranks = first_rank + tl.arange(0, BLOCK_RANKS)
    is_row, is_rank = rows < end_row, ranks < lora_rank
    part = tl.program_id(2)
    inner = tl.arange(0, BLOCK_INPUTS)
    x_ptrs = x_ptr + rows[:, None] * x_stride + inner[None, :]
    a_ptrs = a_ptr + ranks[None, :] * INPUTS + inner[:, None]
    total = tl.zeros((TILE_ROWS, BLOCK_RANKS), tl.float32)
    for step in range(STEPS):
        start = (part * STEPS + step) * BLOCK_INPUTS
        is_input = start + inner < INPUTS
        x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
        a = tl.load(a_ptrs + start, mask=is_rank[None, :] & is_input[:, None], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    at = part.to(tl.int64) * part_stride + rows[:, None] * plane_stride + ranks[None, :]
    tl.store(planes_ptr + at, total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def add_product(total, u, b):
    """Add u [rows, ranks] float32 times b [ranks, outputs] on tensor cores, u hardly rounded."""
    if b.dtype == tl.bfloat16:
        high = u.to(tl.bfloat16)
        low = (u - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, b, tl.dot(low, b, total))
    elif b.dtype == tl.float16:
        return tl.dot(u, b.to(tl.float32), total, input_precision="tf32x3")
    else:
        return tl.dot(u, b, total, input_precision="ieee")


@triton.jit
def load_tile(ptrs, is_row, is_output):
    return tl.load(ptrs, mask=is_row[:, None] & is_output[None, :], other=0.0)


@triton.jit
def load_vector(address, at, end, other):
    """Read float32 numbers from an address, `other` from `end` on or if it is 0."""
    end = tl.where(address == 0, 0, end)
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
    return tl.load(pointer + at, mask=at < end, other=other)


@triton.jit
def store_tile(ptrs, y, delta, gain_at, shift_at, outputs, end, is_row):
    """Store gain y + shift + delta of outputs before `end`, product and sums rounded one by one."""
    gain = load_vector(gain_at, outputs, end, 1.0)
    shift = load_vector(shift_at, outputs, end, 0.0)
    # An fma with zero rounds the product by itself; a plain one would be fused with the sum.
    product = tl.fma(y.to(tl.float32), gain[None, :], tl.zeros_like(delta))
    changed = (product + shift[None, :] + delta).to(y.dtype)
    tl.store(ptrs, changed, mask=is_row[:, None] & (outputs < end)[None, :])


@triton.jit
def sum_planes(
    u_ptrs, part_stride, is_row, is_rank, NUM_PARTS: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Return u [rows, ranks], the parts of K added in order.

    Up to AT_ONCE are loaded at once, of more four: all would not fit the registers.
    """
    u = load_tile(u_ptrs, is_row, is_rank)
    if NUM_PARTS <= AT_ONCE:
        for part in tl.static_range(1, NUM_PARTS):
            u += load_tile(u_ptrs + part * part_stride, is_row, is_rank)
    else:
        for first in tl.range(1, NUM_PARTS, 4, num_stages=1):
            for part in tl.static_range(4):
                is_part = is_rank & (first + part < NUM_PARTS)
                u += load_tile(u_ptrs + (first + part) * part_stride, is_row, is_part)
    return u


# Batches differ in these, and a kernel of its own for each kind would be compiled while they wait.
@triton.jit(
    do_not_specialize=["num_tiles", "part_stride", "plane_stride"],
    do_not_specialize_on_alignment=["tiles_ptr", "shares_ptr", "table_ptr"],
)
def expand_blocks(
    y_ptr,
    planes_ptr,
    tiles_ptr,
    shares_ptr,
    table_ptr,
    num_tiles,
    y_stride,
    part_stride,
    plane_stride,
    DTYPE: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    WIDTH3: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """y[rows, outputs] = gain y + shift + (sum of planes[rows, ranks]) B[ranks, outputs].

    For this program's share of the blocks of outputs of all tiles: neighbours, of one tile and
    module as long as there are such, so that their sum of planes is made once. A share begins where
    shares_ptr says, in tiles times 2^16; without it, all tiles are alike. What a block needs is
    read as early as its address is known: most programs have but one, and take as long as the reads
    that wait for one another.
    """
    blocks0: tl.constexpr = (WIDTH0 + BLOCK - 1) // BLOCK
    blocks1: tl.constexpr = (WIDTH1 + BLOCK - 1) // BLOCK
    blocks2: tl.constexpr = (WIDTH2 + BLOCK - 1) // BLOCK
    blocks3: tl.constexpr = (WIDTH3 + BLOCK - 1) // BLOCK
    # Blocks up to the end of each module.
    ends1: tl.constexpr = blocks0 + blocks1
    ends2: tl.constexpr = ends1 + blocks2
    each: tl.constexpr = ends2 + blocks3
    start_dependents()
    program = tl.program_id(0)
    if shares_ptr is not None:
        share_ptr = shares_ptr + 4 * program
        at = _block_at(tl.load(share_ptr), each)
        last = _block_at(tl.load(share_ptr + 4), each)
        slot, first_row, end_row = _load_tile_fields(share_ptr + 1, True)
    else:
        total, count = num_tiles.to(tl.int64) * each, tl.num_programs(0)
        at = (program * total // count).to(tl.int32)
        last = ((program + 1) * total // count).to(tl.int32)
        slot, first_row, end_row = _load_tile_fields(tiles_ptr + 3 * (at // each), at < last)
    ranks = tl.arange(0, BLOCK_RANKS)
    while at < last:
        block = at % each
        # The slot of an empty tile may be anything.
        slot_ptr = table_ptr + tl.where(first_row < end_row, slot, 0).to(tl.int64) * FIELDS
        # Which module: its blocks are those from `first` to `end`, `offset` outputs lie before it.
        module = tl.where(
            block < blocks0, 0, tl.where(block < ends1, 1, tl.where(block < ends2, 2, 3))
        )
        first = _choice(module, 0, blocks0, ends1, ends2)
        end = _choice(module, blocks0, ends1, ends2, each)
        width = _choice(module, WIDTH0, WIDTH1, WIDTH2, WIDTH3)
        offset = _choice(module, 0, WIDTH0, WIDTH0 + WIDTH1, WIDTH0 + WIDTH1 + WIDTH2)
        count = tl.minimum(end - block, last - at)
        at += count
        is_adapted = (first_row < end_row) & (tl.load(slot_ptr + 1) > 0)
        start = (block - first) * BLOCK
        stop = tl.where(is_adapted, start + count * BLOCK, start)

        module_ptr = slot_ptr + 5 + 3 * module
        b_ptr = pointer_at(module_ptr, DTYPE)
        lora_rank = tl.load(module_ptr + 2).to(tl.int32)
        rows = (first_row + tl.arange(0, TILE_ROWS)).to(tl.int64)
        is_row = rows < end_row
        u_ptrs = planes_ptr + tl.load(module_ptr + 1) + rows[:, None] * plane_stride
        row_ptrs = y_ptr + offset + rows[:, None] * y_stride
        gain_at, shift_at = tl.load(slot_ptr + 2), tl.load(slot_ptr + 3)
        if lora_rank <= BLOCK_RANKS:
            is_rank = ranks < lora_rank
            b_ptrs = b_ptr + ranks[:, None] * width
            outputs = start + tl.arange(0, BLOCK)
            is_first = outputs < tl.minimum(width, stop)
            b = load_tile(b_ptrs + outputs[None, :], is_rank, is_first)
            wait_for_prior()
            y = load_tile(row_ptrs + outputs[None, :], is_row, is_first)
            u = sum_planes(u_ptrs + ranks[None, :], part_stride, is_row, is_rank, NUM_PARTS, 4)
            for left in range(start, stop, BLOCK):
                outputs = left + tl.arange(0, BLOCK)
                later = outputs + BLOCK
                is_later = later < tl.minimum(width, stop)
                next_b = load_tile(b_ptrs + later[None, :], is_rank, is_later)
                next_y = load_tile(row_ptrs + later[None, :], is_row, is_later)
                delta = add_product(tl.zeros((TILE_ROWS, BLOCK), tl.float32), u, b)
                y_ptrs, columns = row_ptrs + outputs[None, :], offset + outputs
                store_tile(y_ptrs, y, delta, gain_at, shift_at, columns, offset + width, is_row)
                b, y = next_b, next_y
        else:
            wait_for_prior()
            for left in range(start, stop, BLOCK):
                outputs = left + tl.arange(0, BLOCK)
                is_output = outputs < width
                delta = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
                for first_rank in range(0, lora_rank, BLOCK_RANKS):
                    some = first_rank + ranks
                    is_rank = some < lora_rank
                    b = load_tile(
                        b_ptr + some[:, None] * width + outputs[None, :], is_rank, is_output
                    )
                    u = sum_planes(
                        u_ptrs + some[None, :], part_stride, is_row, is_rank, NUM_PARTS, 1
                    )
                    delta = add_product(delta, u, b)
                y = load_tile(row_ptrs + outputs[None, :], is_row, is_output)
                y_ptrs, columns = row_ptrs + outputs[None, :], offset + outputs
                store_tile(y_ptrs, y, delta, gain_at, shift_at, columns, offset + width, is_row)

        slot, first_row, end_row = _load_tile_fields(tiles_ptr + 3 * (at // each), at < last)
    wait_for_prior()  # of programs without a share


@triton.jit
def _load_tile_fields(tile_ptr, is_there):
    """Return slot, first row and end row of a tile."""
    slot = tl.load(tile_ptr, mask=is_there, other=0)
    first_row = tl.load(tile_ptr + 1, mask=is_there, other=0)
    return slot, first_row, tl.load(tile_ptr + 2, mask=is_there, other=0)


@triton.jit
def _choice(number, zero, one, two, three):
    """Return the argument that has this number."""
    return tl.where(
        number == 0, zero, tl.where(number == 1, one, tl.where(number == 2, two, three))
    )


@triton.jit
def _block_at(place, each: tl.constexpr):
    """Return which block of all tiles, `each` to a tile, is at a place in tiles times 2^16."""
    return (place >> 16) * each + (((place & 0xFFFF) * each) >> 16)
