"""kernels.native gates.py: a gated activation in one op with the linear before it."""

import pytest
import torch
from torch import Tensor

from kernels.elementwise import GatedActivation
from kernels.linear import LinearWeight
from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import RecordedProgram, Step, ThreadPool
from kernels.quantized import QuantizationMethod, quantize
from kernels.torch_backend import CpuKernels
from tests.kernels.native.lora_cases import BF16, INT8, Linear, some_adapter

DTYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS: list[GatedActivation] = ["silu", "gelu_tanh"]
# Inputs and features: whole panels, and one that is none.
SHAPES = [(576, 1536), (33, 32), (100, 64), (75, 40)]
ROWS = [1, 2, 3, 13, 16, 17, 33, 255, 256, 257, 600]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_as_apart(
    kernels: NativeKernels,
    weight: LinearWeight,
    activation: GatedActivation,
    rows: list[int],
    dtype: torch.dtype,
) -> None:
    """Compare with a linear whose outputs are written before another op activates them."""
    for num_rows in rows:
        x = randn(num_rows, weight.in_features, seed=num_rows, dtype=dtype)
        out = kernels.gated_linear(x, weight, activation)
        assert out.dtype == dtype
        assert torch.equal(out, CpuKernels.gated_linear(kernels, x, weight, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("num_inputs", "width"), SHAPES)
def test_gates_and_ups_of_a_plain_weight_become_what_they_do_apart(
    library_of_products: Library,
    num_inputs: int,
    width: int,
    activation: GatedActivation,
    dtype: torch.dtype,
) -> None:
    kernels = NativeKernels(ThreadPool(library_of_products, 2))
    weight = randn(2 * width, num_inputs, seed=1, dtype=dtype)
    packed = kernels.prepare_linear(weight, randn(2 * width, seed=2, dtype=dtype))
    assert_same_as_apart(kernels, packed, activation, ROWS, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize(("num_inputs", "width"), SHAPES)
def test_gates_and_ups_of_a_quantized_weight_become_what_they_do_apart(
    library_of_codes: Library,
    num_inputs: int,
    width: int,
    method: QuantizationMethod,
    dtype: torch.dtype,
) -> None:
    kernels = NativeKernels(ThreadPool(library_of_codes, 2))
    weight = quantize(randn(2 * width, num_inputs, seed=1), method)
    bias = randn(2 * width, seed=2, dtype=dtype)
    packed = kernels.prepare_quantized_linear(weight, bias, dtype)
    assert_same_as_apart(kernels, packed, "silu", ROWS, dtype)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    library_of_products: Library, num_threads: int
) -> None:
    kernels = NativeKernels(ThreadPool(library_of_products, num_threads))
    packed = kernels.prepare_linear(randn(192, 64, seed=1, dtype=torch.bfloat16))
    x = randn(300, 64, seed=2, dtype=torch.bfloat16)
    together = kernels.gated_linear(x, packed, "silu")
    for row in (0, 31, 255, 256, 299):
        alone = kernels.gated_linear(x[row : row + 1], packed, "silu")
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("method", [None, "int8", "int4"])
def test_a_recorded_product_is_the_same(
    library_of_products: Library, method: QuantizationMethod | None
) -> None:
    kernels = NativeKernels(ThreadPool(library_of_products, 2))
    weight = randn(128, 96, seed=1, dtype=torch.bfloat16)
    if method is None:
        packed = kernels.prepare_linear(weight)
    else:
        packed = kernels.prepare_quantized_linear(quantize(weight, method), None, torch.bfloat16)
    program = RecordedProgram(8)
    x = torch.empty(8, 96, dtype=torch.bfloat16)
    with kernels.recording(program):
        out = kernels.gated_linear(x, packed, "silu")
    x[:5] = randn(5, 96, seed=2)
    program.run(kernels.thread_pool, Step(5))
    assert torch.equal(out[:5], kernels.gated_linear(x[:5], packed, "silu"))


def test_no_rows_give_no_rows(library_of_products: Library) -> None:
    kernels = NativeKernels(ThreadPool(library_of_products, 1))
    packed = kernels.prepare_linear(randn(64, 32, seed=1))
    assert kernels.gated_linear(torch.empty(0, 32), packed, "silu").shape == (0, 32)


# (Slot, first row, end) of rows with adapters; others have none.
RUNS = [[(0, 0, 1)], [(3, 0, 1), (2, 1, 2), (1, 2, 5), (0, 9, 13)], [(1, 0, 20), (3, 21, 300)]]


@pytest.mark.parametrize("runs", RUNS, ids=["one row", "few rows", "many rows"])
@pytest.mark.parametrize("method", [None, "int8", "int4"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_adapters_in_int8_add_to_gates_and_ups_what_they_do_apart(
    library_of_codes: Library,
    method: QuantizationMethod | None,
    runs: list[tuple[int, int, int]],
    num_threads: int,
) -> None:
    num_inputs, width = 100, 96
    kernels = NativeKernels(ThreadPool(library_of_codes, num_threads))
    weight = randn(2 * width, num_inputs, seed=1, dtype=BF16)
    packed = (
        kernels.prepare_linear(weight)
        if method is None
        else kernels.prepare_quantized_linear(quantize(weight, method), None, BF16)
    )
    ranks = [[8, 3], [16, 0], [64, 64], [0, 5]]
    made = [
        some_adapter(num_inputs, [width, width], one, 3 + index, dora=index % 2 == 1).to(INT8)
        for index, one in enumerate(ranks)
    ]
    linear = Linear(library_of_codes, num_inputs, [width, width], [made[0], made[1], None, made[3]])
    num_rows = runs[-1][-1] + 1
    x, lora = randn(num_rows, num_inputs, seed=2, dtype=BF16), linear.rows(num_rows, runs)
    together = kernels.gated_linear(x, packed, "silu", lora)
    assert torch.equal(together, CpuKernels.gated_linear(kernels, x, packed, "silu", lora))
    assert not torch.equal(together, kernels.gated_linear(x, packed, "silu"))
    step = Step(num_rows, runs=runs)
    program = RecordedProgram(num_rows + 5)
    with kernels.recording(program):
        memory = program.buffer("x", (num_inputs,), BF16)
        out = kernels.gated_linear(memory, packed, "silu", lora)
    memory[:num_rows] = x
    program.run(kernels.thread_pool, step)
    assert torch.equal(out[:num_rows], together)
