"""The two kernels of LoRA, each for one tile of rows of one adapter, and how they find it.

apply.py chooses grids and sizes.

A table's row says where a slot's A and B lie: [A, lora_rank, gain, shift] and for each module
[B, first lora_rank, lora_rank], addresses as integers.
"""

import triton
import triton.language as tl


@triton.jit
def pointer_at(field_ptr, dtype: tl.constexpr):
    """Read an address on 16 bytes, so that what lies there can be read 16 bytes at a time."""
    return tl.multiple_of(tl.load(field_ptr).to(tl.pointer_type(dtype)), 16)


@triton.jit
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
    tile_ptr = tiles_ptr + 3 * tl.program_id(0)
    first_row, end_row = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if first_row >= end_row:  # before its slot is looked at, which may be anything
        return
    slot_ptr = table_ptr + tl.load(tile_ptr).to(tl.int64) * FIELDS
    lora_rank = tl.load(slot_ptr + 1)
    first_rank = tl.program_id(1) * BLOCK_RANKS
    if first_rank >= lora_rank:
        return
    rows = (first_row + tl.arange(0, TILE_ROWS)).to(tl.int64)
    ranks = first_rank + tl.arange(0, BLOCK_RANKS)
    is_row, is_rank = rows < end_row, ranks < lora_rank
    part = tl.program_id(2)
    inner = tl.arange(0, BLOCK_INPUTS)
    x_ptrs = x_ptr + rows[:, None] * x_stride + inner[None, :]
    a_ptrs = pointer_at(slot_ptr, x_ptr.dtype.element_ty) + ranks[None, :] * INPUTS + inner[:, None]
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
def load_vector(field_ptr, at, end, other):
    """Read float32 numbers from the address in a field, `other` from `end` on or if it is 0."""
    end = tl.where(tl.load(field_ptr) == 0, 0, end)
    return tl.load(pointer_at(field_ptr, tl.float32) + at, mask=at < end, other=other)


@triton.jit
def store_tile(ptrs, y, delta, slot_ptr, outputs, end, is_row):
    """Store gain y + shift + delta of outputs before `end`, product and sums rounded one by one."""
    gain = load_vector(slot_ptr + 2, outputs, end, 1.0)
    shift = load_vector(slot_ptr + 3, outputs, end, 0.0)
    # An fma with zero rounds the product by itself; a plain one would be fused with the sum.
    product = tl.fma(y.to(tl.float32), gain[None, :], tl.zeros_like(delta))
    changed = (product + shift[None, :] + delta).to(y.dtype)
    tl.store(ptrs, changed, mask=is_row[:, None] & (outputs < end)[None, :])


@triton.jit
def expand_tile(
    y_ptr,
    planes_ptr,
    tiles_ptr,
    table_ptr,
    y_stride,
    part_stride,
    plane_stride,
    DTYPE: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """y[rows, outputs] = gain y + shift + (sum of planes[rows, ranks]) B[ranks, outputs].

    For two neighbouring halves of a block of outputs, which share the sum.
    """
    tile_ptr = tiles_ptr + 3 * tl.program_id(0)
    first_row, end_row = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    if first_row >= end_row:
        return
    slot_ptr = table_ptr + tl.load(tile_ptr).to(tl.int64) * FIELDS
    if tl.load(slot_ptr + 1) == 0:
        return
    # Which module, and where in it: `block` of its own, `offset` outputs after those before it.
    blocks0: tl.constexpr = (WIDTH0 + 2 * HALF_BLOCK - 1) // (2 * HALF_BLOCK)
    blocks1: tl.constexpr = (WIDTH1 + 2 * HALF_BLOCK - 1) // (2 * HALF_BLOCK)
    block = tl.program_id(1)
    module = tl.where(block < blocks0, 0, tl.where(block < blocks0 + blocks1, 1, 2))
    block -= tl.where(module == 0, 0, tl.where(module == 1, blocks0, blocks0 + blocks1))
    offset = tl.where(module == 0, 0, tl.where(module == 1, WIDTH0, WIDTH0 + WIDTH1))
    width = tl.where(module == 0, WIDTH0, tl.where(module == 1, WIDTH1, WIDTH2))

    rows = (first_row + tl.arange(0, TILE_ROWS)).to(tl.int64)
    left = block * 2 * HALF_BLOCK + tl.arange(0, HALF_BLOCK)
    right = left + HALF_BLOCK
    is_row, is_left, is_right = rows < end_row, left < width, right < width
    y_ptrs = y_ptr + offset + rows[:, None] * y_stride + left[None, :]
    y_left = load_tile(y_ptrs, is_row, is_left)
    y_right = load_tile(y_ptrs + HALF_BLOCK, is_row, is_right)

    module_ptr = slot_ptr + 4 + 3 * module
    b_ptrs = pointer_at(module_ptr, DTYPE) + left[None, :]
    lora_rank = tl.load(module_ptr + 2).to(tl.int32)
    u_ptrs = planes_ptr + tl.load(module_ptr + 1) + rows[:, None] * plane_stride
    delta_left = tl.zeros((TILE_ROWS, HALF_BLOCK), tl.float32)
    delta_right = tl.zeros((TILE_ROWS, HALF_BLOCK), tl.float32)
    for first_rank in range(0, lora_rank, BLOCK_RANKS):
        ranks = first_rank + tl.arange(0, BLOCK_RANKS)
        is_rank = ranks < lora_rank
        b_left = load_tile(b_ptrs + ranks[:, None] * width, is_rank, is_left)
        b_right = load_tile(b_ptrs + ranks[:, None] * width + HALF_BLOCK, is_rank, is_right)
        u = load_tile(u_ptrs + ranks[None, :], is_row, is_rank)
        for part in tl.static_range(1, NUM_PARTS):
            u += load_tile(u_ptrs + part * part_stride + ranks[None, :], is_row, is_rank)
        delta_left = add_product(delta_left, u, b_left)
        delta_right = add_product(delta_right, u, b_right)

    store_tile(y_ptrs, y_left, delta_left, slot_ptr, offset + left, offset + width, is_row)
    y_ptrs += HALF_BLOCK
    store_tile(y_ptrs, y_right, delta_right, slot_ptr, offset + right, offset + width, is_row)
