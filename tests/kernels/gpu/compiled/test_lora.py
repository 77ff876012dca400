"""LoRA's kernels as compiled: nothing spilled, wide loads, as many blocks on an SM as planned."""

import re

import pytest
import torch

from kernels.gpu.lora.apply import lora_apply
from tests.kernels.gpu.compiler import SHARED_LIMIT, Compiled, compiling

BF16 = torch.bfloat16
# Fused linears of SmolLM2-135M and of Llama-3.1-8B: inputs, widths.
SMALL_QKV, SMALL_DOWN = (576, (576, 192, 192)), (1536, (576,))
QKV, DOWN = (4096, (4096, 1024, 1024)), (14336, (4096,))


def compile_apply(
    architecture: int,
    inputs: int,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    y_dtype: torch.dtype | None = None,
) -> list[Compiled]:
    x, y = torch.empty(2, inputs, dtype=dtype), torch.empty(2, sum(widths), dtype=y_dtype or dtype)
    tiles = torch.zeros(2, 3, dtype=torch.int32)
    table = torch.zeros(2, 5 + 3 * len(widths), dtype=torch.int64)
    with compiling(architecture) as found:
        lora_apply(y, x, tiles, table, widths, dtype, 64)
    for kernel in found:
        # For Blackwell ptxas lays an address of Q, K and V's aside while the loops run.
        assert kernel.stack_bytes <= (8 if architecture == 100 else 0)
        assert kernel.shared_bytes <= SHARED_LIMIT[architecture]
    return found


@pytest.mark.parametrize(("inputs", "widths"), [SMALL_QKV, SMALL_DOWN, QKV, DOWN])
def test_models_are_read_16_bytes_at_a_time_by_many_blocks(
    architecture: int, inputs: int, widths: tuple[int, ...]
) -> None:
    shrink, expand = compile_apply(architecture, inputs, widths, BF16)
    assert shrink.num_matrix_instructions > 0 and expand.num_matrix_instructions > 0
    # Fields of the tile are 4 bytes wide and of the table 8, nothing else in shrink is.
    assert set(shrink.load_bytes) == {4, 8, 16} and shrink.load_bytes[4] == 3
    assert shrink.load_bytes[8] == 2
    # x and A, each 16 by 256 elements, 4 loads of each thread and step
    assert shrink.load_bytes[16] % 8 == 0
    # B and y, a half each; sums of planes stay narrow, since a module's lora_ranks start anywhere
    assert expand.load_bytes[16] >= 4 and 2 not in expand.load_bytes
    assert shrink.blocks_per_sm >= (4 if architecture == 80 else 6)
    assert expand.blocks_per_sm >= 4  # as many as there are programs for an SM


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_do_not_spill(architecture: int, dtype: torch.dtype) -> None:
    shrink, expand = compile_apply(architecture, *QKV, dtype)
    uses_tensor_cores = dtype == torch.float16
    assert (shrink.num_matrix_instructions > 0) == uses_tensor_cores
    assert (expand.num_matrix_instructions > 0) == uses_tensor_cores
    assert min(shrink.blocks_per_sm, expand.blocks_per_sm) >= 3


def test_a_part_of_a_sum_over_ranks_takes_narrow_weights(architecture: int) -> None:
    shrink, expand = compile_apply(architecture, *QKV, BF16, y_dtype=torch.float32)
    assert min(shrink.num_matrix_instructions, expand.num_matrix_instructions) > 0


def test_odd_widths_compile(architecture: int) -> None:
    compile_apply(architecture, 75, (33,), BF16)


def test_the_inner_vector_is_multiplied_in_two_halves(architecture: int) -> None:
    """Twice the instructions of one bfloat16 product: 16 ranks, 64 outputs of a warp, two halves.

    And all that twice: for adapters of at most 16 ranks, and for others.
    """
    _, expand = compile_apply(architecture, *SMALL_DOWN, BF16)
    assert expand.num_matrix_instructions == 2 * 2 * 8


def test_gain_and_shift_are_not_fused_into_one_rounding(architecture: int) -> None:
    """A sum of its own for shift and for delta of each of a thread's 32 outputs, on both ways."""
    _, expand = compile_apply(architecture, *SMALL_QKV, BF16)
    # Blackwell has instructions that do two of them.
    products = sum(2 if two else 1 for two in re.findall(r"\bFFMA(2?)\b", expand.sass))
    sums = sum(2 if two else 1 for two in re.findall(r"\bFADD(2?)\b", expand.sass))
    assert products == 2 * 32 and sums >= 2 * 64
