"""Faults planted in kernels: what the compiler reports of them is noticed."""

import torch
import triton
import triton.language as tl

from kernels.gpu.constants import LAUNCH_OPTIONS
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
def centre(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x - tl.sum(x))  # all of x is held until its sum is known


@triton.jit
def copy(source_ptr, target_ptr, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target_ptr + at, tl.load(source_ptr + at * STRIDE))


def test_a_kernel_that_spills_is_noticed(architecture: int) -> None:
    x = torch.empty(16384)
    with compiling(architecture) as found:
        centre[(1,)](x, x, SIZE=1024, num_warps=1, **LAUNCH_OPTIONS)
        centre[(1,)](x, x, SIZE=16384, num_warps=1, **LAUNCH_OPTIONS)  # 512 values for each thread
    assert found[0].stack_bytes == 0
    assert found[1].stack_bytes > 0
    assert found[0].registers < found[1].registers


def test_shared_memory_and_blocks_of_an_sm_are_told(architecture: int) -> None:
    a, out = torch.empty(128, 128, dtype=torch.bfloat16), torch.empty(128, 128)
    with compiling(architecture) as found:
        product[(1,)](
            a, a, out, 128, SIZE=128, STEP=64, num_warps=8, num_stages=2, **LAUNCH_OPTIONS
        )
        product[(1,)](
            a, a, out, 128, SIZE=128, STEP=64, num_warps=8, num_stages=4, **LAUNCH_OPTIONS
        )
    assert 0 < found[0].shared_bytes < found[1].shared_bytes
    assert found[0].blocks_per_sm >= found[1].blocks_per_sm >= 1


def test_matrix_instructions_are_counted(architecture: int) -> None:
    a, out = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 64)
    with compiling(architecture) as found:
        product[(1,)](a, a, out, 64, SIZE=64, STEP=64, **LAUNCH_OPTIONS)
        copy[(1,)](out, out, STRIDE=1, SIZE=256, **LAUNCH_OPTIONS)
    assert found[0].num_matrix_instructions > 0
    assert found[1].num_matrix_instructions == 0


def test_the_width_of_loads_is_seen(architecture: int) -> None:
    x = torch.empty(4096)
    with compiling(architecture) as found:
        copy[(1,)](x, x, STRIDE=1, SIZE=512, num_warps=4, **LAUNCH_OPTIONS)
        copy[(1,)](x, x, STRIDE=3, SIZE=512, num_warps=4, **LAUNCH_OPTIONS)
    assert set(found[0].load_bytes) == {16}
    assert set(found[1].load_bytes) == {4}


def test_a_launch_is_specialised_as_it_would_be(architecture: int) -> None:
    """A pointer that is not a multiple of 16 bytes cannot be read 16 bytes at a time."""
    x = torch.empty(4096)
    with compiling(architecture) as found:
        copy[(1,)](x[1:], x, STRIDE=1, SIZE=512, num_warps=4, **LAUNCH_OPTIONS)
    assert set(found[0].load_bytes) == {4}


def test_each_architecture_gets_code_of_its_own() -> None:
    a, out = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 64)
    families = []
    for one in (80, 90, 100, 80):
        with compiling(one) as found:
            product[(1,)](a, a, out, 64, SIZE=64, STEP=64, **LAUNCH_OPTIONS)
        families.append(
            next(name for name in ("UTCHMMA", "HGMMA", "HMMA") if name in found[0].sass)
        )
    assert families == ["HMMA", "HGMMA", "UTCHMMA", "HMMA"]
