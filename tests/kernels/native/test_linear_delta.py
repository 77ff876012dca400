"""kernels.native linear_delta.h: what a linear adds for LoRA in int8 is what lora_expand would."""

import pytest
import torch

from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import RecordedProgram, Step, ThreadPool
from kernels.quantized import QuantizationMethod, quantize
from tests.kernels.native.lora_cases import BF16, F32, INT8, Linear, randn, some_adapter

WIDTHS = [96, 32, 64]
RANKS = [[8, 3, 0], [16, 0, 5], [70, 64, 1], [2, 130, 33]]
# (Slot, first row, end) of rows with adapters; others have none, and slot 4 is empty.
RUNS = {
    "two rows": [(2, 0, 2)],
    "a tile of one": [(3, 0, 16)],
    "a tile of some": [(0, 0, 5), (4, 5, 7), (1, 7, 8), (2, 9, 15)],
    "two tiles": [(1, 0, 9), (3, 9, 25), (0, 28, 31)],
    "passes": [(3, 0, 7), (0, 7, 30), (4, 30, 33), (2, 34, 36), (1, 40, 110)],
}


def made(library: Library, num_inputs: int) -> Linear:
    adapters = [
        some_adapter(num_inputs, WIDTHS, one, 3 + index, dora=index % 2 == 1).to(INT8)
        for index, one in enumerate(RANKS)
    ]
    return Linear(library, num_inputs, WIDTHS, [*adapters, None])


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("method", [None, "int8", "int4"])
@pytest.mark.parametrize("num_inputs", [64, 100])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_linear_adds_what_the_two_ops_of_a_lora_do(
    library_of_codes: Library,
    num_threads: int,
    num_inputs: int,
    method: QuantizationMethod | None,
    runs: list[tuple[int, int, int]],
) -> None:
    kernels = NativeKernels(ThreadPool(library_of_codes, num_threads))
    weight = randn(sum(WIDTHS), num_inputs, seed=1).bfloat16()
    packed = (
        kernels.prepare_linear(weight)
        if method is None
        else kernels.prepare_quantized_linear(quantize(weight, method), None, BF16)
    )
    num_rows = runs[-1][-1] + 1
    x = randn(num_rows, num_inputs, seed=2).bfloat16()
    linear = made(library_of_codes, num_inputs)  # whose memory is read as long as it is there
    lora = linear.rows(num_rows, runs)
    apart = kernels.linear(x, packed).clone()
    kernels.lora_apply(apart, x, lora)
    assert not torch.equal(apart, kernels.linear(x, packed))
    assert torch.equal(kernels.linear(x, packed, lora), apart)
    program = RecordedProgram(num_rows + 5)
    with kernels.recording(program):
        memory = program.buffer("x", (num_inputs,), BF16)
        out = kernels.linear(memory, packed, lora)
    memory[:num_rows] = x
    for rows in (num_rows, 0, num_rows):
        program.run(kernels.thread_pool, Step(rows, runs=runs if rows else []))
    assert torch.equal(out[:num_rows], apart)


def test_rows_of_float32_are_given_theirs_too(library_of_codes: Library) -> None:
    kernels = NativeKernels(ThreadPool(library_of_codes, 2))
    packed = kernels.prepare_linear(randn(sum(WIDTHS), 64, seed=1))
    x = randn(111, 64, seed=2)
    linear = made(library_of_codes, 64)
    lora = linear.rows(111, RUNS["passes"])
    apart = kernels.linear(x, packed).clone()
    kernels.lora_apply(apart, x, lora)
    assert apart.dtype == F32
    assert torch.equal(kernels.linear(x, packed, lora), apart)


def test_a_linear_in_int8_finds_rows_that_lora_has_brought_there_and_all_others(
    library_of_codes: Library,
) -> None:
    kernels = NativeKernels(ThreadPool(library_of_codes, 2))
    weight = quantize(randn(sum(WIDTHS), 64, seed=1).bfloat16(), "int8")
    packed = kernels.prepare_quantized_linear(weight, None, BF16)
    x = randn(40, 64, seed=2).bfloat16()
    plain = kernels.linear(x, packed).clone()
    linear = made(library_of_codes, 64)
    for runs, adapted in (([(0, 3, 4)], 1), ([(4, 0, 40)], 0), ([], 0)):
        found = kernels.linear(x, packed, linear.rows(40, runs))
        assert (found != plain).any(1).sum() == adapted
