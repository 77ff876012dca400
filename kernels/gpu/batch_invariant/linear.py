"""A linear layer on a GPU whose every row has the same bits, whatever rows stand beside it.

cuBLAS picks a kernel, and with it the order of the sums, by the number of rows; this is for the
`deterministic` setting. The order of the sums is fixed also across ranks that hold parts of K.

Why tiles of 64, 128 and 256 rows may stand beside each other: an element is one chain of sums over
K that starts at zero, 16 at a time in each tensor core instruction, in the order of K. All tiles
keep that order and the BLOCK_INPUTS, and compile to instructions of one family (wgmma on Hopper,
tcgen05 on Blackwell, mma.sync on Ampere), which differ in how many elements they make and not in
how they make one. Tests compare their bits, and see which instructions come out.

Shapes: T rows, K inputs, N outputs.
"""

import torch
from torch import Tensor

from kernels.gpu.batch_invariant.bulk import bulk_product, has_bulk_copies
from kernels.gpu.batch_invariant.split import SPLIT_ROWS, split_product
from kernels.gpu.batch_invariant.tiles import FEW_ROWS, tiled_product

_MAX_PARTS = 8
_MIN_PART = 16  # what one tensor core instruction takes of K


def num_tree_parts(inputs: int) -> int:
    """Return in how many parts K is cut for ranks to share: whatever divides it fits the tree."""
    num_parts = _MAX_PARTS
    while inputs % (num_parts * _MIN_PART):
        num_parts //= 2
        if num_parts == 1:
            return 1
    return num_parts


def batch_invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_parts: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x @ weight.T + bias, row i depending on row i of x alone.

    K is cut in `num_parts` equal parts. Each is summed from zero in float32, and the parts are
    added by a binary tree in float32, ((p0 + p1) + (p2 + p3)) + ...: a rank that holds a half of K
    and takes half as many parts, with float32 results and no bias, computes a branch of the tree,
    and ranks that add their results as the tree does have the bits of one rank. The bias is added
    last, in float32, before the one rounding.

    Three ways with the same bits: for few rows the parts of K run beside each other (split.py),
    for many rows Hopper copies whole tiles by itself (bulk.py), for others see tiles.py. The idea
    of fixed tiles is of batch_invariant_ops, Thinking Machines.

    Args:
        x: [T, K] float32, float16 or bfloat16, each row contiguous; T may be 0.
        weight: [N, K] of the same dtype, contiguous.
        bias: [N], or None.
        num_parts: a power of two up to 8; each of several parts a multiple of 16.
        out_dtype: None: x's.

    Returns:
        [T, N] of out_dtype.
    """
    (num_rows, inputs), outputs = x.shape, weight.shape[0]
    assert x.dtype == weight.dtype, f"one dtype, not {x.dtype} and {weight.dtype}"
    assert x.stride(1) == 1 and weight.is_contiguous(), "contiguous rows"
    assert num_parts in (1, 2, 4, 8), f"{num_parts} parts: has to be a power of two up to 8"
    assert num_parts == 1 or inputs % (num_parts * _MIN_PART) == 0, (
        f"{inputs} inputs in {num_parts} parts: a part has to be a multiple of {_MIN_PART}"
    )
    y = torch.empty(num_rows, outputs, device=x.device, dtype=out_dtype or x.dtype)
    if num_rows == 0:
        return y
    if num_parts > 1 and num_rows <= SPLIT_ROWS:
        split_product(x, weight, bias, y, num_parts)
    elif num_rows > FEW_ROWS and has_bulk_copies(x, weight, num_parts):
        bulk_product(x, weight, bias, y, num_parts)
    else:
        tiled_product(x, weight, bias, y, num_parts)
    return y
