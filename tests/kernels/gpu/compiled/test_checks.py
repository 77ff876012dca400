"""Faults planted in kernels: what the compiler reports of them is noticed."""

import torch
import triton
import triton.language as tl

from kernels.gpu.options import OPTIONS
from tests.kernels.gpu.compiler import compiling


@triton.jit
def product(a_ptr, b_ptr, out_ptr, depth, SIZE: tl.constexpr, STEP: tl.constexpr):
    rows, inner = tl.arange(0, SIZE), tl.arange(0, STEP)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, depth, STEP):
        a = tl.load(a_ptr + rows[:, None] * depth + (start + inner)[None, :])
        b = tl.load(b_ptr + rows[None, :] * depth + (start + inner)[:, None])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + rows[:, None] * SIZE + rows[None, :], total)


@triton.jit
def copy(source_ptr, target_ptr, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target_ptr + at, tl.load(source_ptr + at * STRIDE))


def test_a_kernel_that_spills_is_noticed(architecture: int) -> None:
    a = torch.empty(128, 128, dtype=torch.bfloat16)
    out = torch.empty(128, 128)
    with compiling(architecture) as found:
        product[(1,)](a, a, out, 128, SIZE=128, STEP=64, num_warps=8, **OPTIONS)
        product[(1,)](a, a, out, 128, SIZE=128, STEP=64, num_warps=4, maxnreg=64, **OPTIONS)
    assert found[0].stack_bytes == 0
    if architecture < 100:  # there the total lies in tensor memory, not in registers
        assert found[1].stack_bytes > 0
    assert found[0].registers > 0 and found[0].shared_bytes > 0


def test_matrix_instructions_are_counted(architecture: int) -> None:
    a, out = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 64)
    with compiling(architecture) as found:
        product[(1,)](a, a, out, 64, SIZE=64, STEP=64, **OPTIONS)
        copy[(1,)](out, out, STRIDE=1, SIZE=256, **OPTIONS)
    assert found[0].num_matrix_instructions > 0
    assert found[1].num_matrix_instructions == 0


def test_the_width_of_loads_is_seen(architecture: int) -> None:
    x = torch.empty(4096)
    with compiling(architecture) as found:
        copy[(1,)](x, x, STRIDE=1, SIZE=512, num_warps=4, **OPTIONS)
        copy[(1,)](x, x, STRIDE=3, SIZE=512, num_warps=4, **OPTIONS)
    assert set(found[0].load_bytes) == {16}
    assert set(found[1].load_bytes) == {4}


def test_a_launch_is_specialised_as_it_would_be(architecture: int) -> None:
    """A pointer that is not a multiple of 16 bytes cannot be read 16 bytes at a time."""
    x = torch.empty(4096)
    with compiling(architecture) as found:
        copy[(1,)](x[1:], x, STRIDE=1, SIZE=512, num_warps=4, **OPTIONS)
    assert set(found[0].load_bytes) == {4}
