"""The steady product as compiled: both tiles on the same kind of tensor core, nothing spilled."""

import re

import pytest
import torch

from kernels.gpu.batch_invariant.bulk import bulk_product, fits_bulk_copies
from kernels.gpu.batch_invariant.linear import batch_invariant_linear
from tests.kernels.gpu.compiler import SHARED_LIMIT, Compiled, compiling

# Rows: for the parts of K beside each other, for the tile of 64 and for that of 128.
SPLIT, FEW, MANY = 1, 65, 300
# K and N of linears of SmolLM2-135M and of Llama-3.1-8B
SMALL_DOWN, QKV, GATE_UP, DOWN = (1536, 576), (4096, 6144), (4096, 28672), (14336, 4096)
FAMILY = {80: "HMMA.16816.F32.BF16", 90: "HGMMA.64x", 100: "UTCHMMA"}


def compile_product(
    architecture: int,
    num_rows: int,
    inputs: int,
    outputs: int,
    num_parts: int,
    dtype: torch.dtype = torch.bfloat16,
    has_bias: bool = False,
) -> Compiled:
    x, weight = torch.empty(num_rows, inputs, dtype=dtype), torch.empty(1, dtype=dtype)
    bias = torch.empty(outputs, dtype=dtype) if has_bias else None
    with compiling(architecture) as found:
        batch_invariant_linear(x, weight.new_empty(outputs, inputs), bias, num_parts)
    assert found[0].stack_bytes == 0
    assert found[0].shared_bytes <= SHARED_LIMIT[architecture]
    return found[0]


@pytest.mark.parametrize(
    ("inputs", "outputs", "num_parts"), [(*SMALL_DOWN, 2), (*QKV, 1), (*DOWN, 4)]
)
def test_models_are_multiplied_by_one_family_of_instructions_for_any_number_of_rows(
    architecture: int, inputs: int, outputs: int, num_parts: int
) -> None:
    for num_rows in (FEW, MANY):
        kernel = compile_product(architecture, num_rows, inputs, outputs, num_parts)
        used = set(re.findall(r"\b((?:HMMA|HGMMA|UTC\w*MMA)[\w.]*)", kernel.sass))
        assert used and all(one.startswith(FAMILY[architecture]) for one in used)
        assert set(kernel.load_bytes) == {16}
        if num_rows == FEW:  # enough of the weight is on its way
            assert kernel.blocks_per_sm >= (2 if num_parts > 1 else 3)


def test_many_outputs_are_read_by_two_blocks_at_once(architecture: int) -> None:
    kernel = compile_product(architecture, FEW, *GATE_UP, num_parts=1)
    assert set(kernel.load_bytes) == {16} and kernel.blocks_per_sm == 2


@pytest.mark.parametrize("num_rows", [FEW, MANY])
def test_a_tree_of_eight_parts_stays_in_registers(architecture: int, num_rows: int) -> None:
    compile_product(architecture, num_rows, *DOWN, num_parts=8, has_bias=True)


def test_whole_tiles_of_many_rows_leave_room_for_a_second_block() -> None:
    """On Hopper: while one block writes its results, the other multiplies."""
    assert compile_product(90, MANY, *QKV, num_parts=1).blocks_per_sm == 2


def test_float32_is_multiplied_without_tensor_cores(architecture: int) -> None:
    kernel = compile_product(architecture, FEW, *SMALL_DOWN, 1, torch.float32)
    assert kernel.num_matrix_instructions == 0
    compile_product(architecture, FEW, *SMALL_DOWN, 8, torch.float32)


@pytest.mark.parametrize(("inputs", "outputs", "num_parts"), [(*SMALL_DOWN, 4), (*DOWN, 8)])
def test_parts_beside_each_other_take_the_same_instructions(
    architecture: int, inputs: int, outputs: int, num_parts: int
) -> None:
    kernel = compile_product(architecture, SPLIT, inputs, outputs, num_parts)
    assert kernel.name == "_part_tile"
    used = set(re.findall(r"\b((?:HMMA|HGMMA|UTC\w*MMA)[\w.]*)", kernel.sass))
    assert used and all(one.startswith(FAMILY[architecture]) for one in used)
    assert set(kernel.load_bytes) == {16} and kernel.blocks_per_sm >= 2


@pytest.mark.parametrize(
    ("inputs", "outputs", "num_parts"), [(*GATE_UP, 1), (*DOWN, 8), (*DOWN, 2)]
)
def test_on_hopper_the_accelerator_copies_tiles_of_many_rows(
    inputs: int, outputs: int, num_parts: int
) -> None:
    x, weight = (torch.empty(n, inputs, dtype=torch.bfloat16) for n in (MANY, outputs))
    y = torch.empty(MANY, outputs, dtype=torch.float32)
    assert fits_bulk_copies(x, weight, num_parts)
    with compiling(90) as found:
        bulk_product(x, weight, None, y, num_parts)
    (kernel,) = found
    assert kernel.stack_bytes == 0 and kernel.shared_bytes <= SHARED_LIMIT[90]
    assert "UTMALDG" in kernel.sass and "HGMMA.64x" in kernel.sass
    assert not any(width > 4 for width in kernel.load_bytes) or num_parts > 1
