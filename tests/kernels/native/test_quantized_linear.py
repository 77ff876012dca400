"""kernels.native quantized_linear.c: products have the bits that kernels.quantized says."""

import pytest
import torch
from torch import Tensor

from kernels.experts import Routing
from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import RecordedProgram, Step, ThreadPool
from kernels.quantized import (
    MAX_INPUTS,
    QuantizationMethod,
    QuantizedWeight,
    quantize,
    quantized_linear,
)

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(576, 960), (1536, 576), (64, 32), (48, 31), (7, 5), (33, 70), (1, 1), (101, 33)]


@pytest.fixture
def library(library_of_codes: Library) -> Library:
    return library_of_codes


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["int8", "int4"])
def method(request: pytest.FixtureRequest) -> QuantizationMethod:
    name: QuantizationMethod = request.param
    return name


def some_weight(
    num_outputs: int, num_inputs: int, method: QuantizationMethod, seed: int = 1
) -> QuantizedWeight:
    """Return one whose outputs are of unlike size."""
    weight = randn(num_outputs, num_inputs, seed=seed)
    return quantize(weight * (torch.arange(num_outputs) % 7 + 0.1).unsqueeze(1), method)


def some_rows(num_rows: int, num_inputs: int, seed: int) -> Tensor:
    """Return rows some of whose inputs are far larger than others."""
    sizes = 2.0 ** randn(num_rows, num_inputs // 32 + 1, seed=seed).mul(2).round()
    return (
        randn(num_rows, num_inputs, seed=seed + 1) * sizes.repeat_interleave(32, 1)[:, :num_inputs]
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal, NaN where NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_the_references_bit_for_bit(
    library: Library,
    method: QuantizationMethod,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
    *,
    has_bias: bool,
) -> None:
    kernels = NativeKernels(ThreadPool(library, 2))
    weight = some_weight(num_outputs, num_inputs, method)
    bias = randn(num_outputs, seed=2, dtype=dtype) if has_bias else None
    packed = kernels.prepare_quantized_linear(weight, bias, dtype)
    for num_rows in (*range(18), 40):
        x = some_rows(num_rows, num_inputs, seed=100 + num_rows).to(dtype)
        y = kernels.linear(x, packed)
        assert y.dtype == torch.float32
        assert torch.equal(y, quantized_linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1536, 200), (33, 70)])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    library: Library,
    method: QuantizationMethod,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
) -> None:
    weight = some_weight(num_outputs, num_inputs, method)
    x = some_rows(700, num_inputs, seed=2).to(dtype)  # of 1,536 inputs more than one block of rows
    results = []
    for num_threads in (1, 2, 3):
        kernels = NativeKernels(ThreadPool(library, num_threads))
        packed = kernels.prepare_quantized_linear(weight, None, dtype)
        results.append(kernels.linear(x, packed))
        for first, size in ((0, 1), (7, 2), (100, 17), (699, 1), (3, 401)):
            part = kernels.linear(x[first : first + size], packed)
            assert torch.equal(part, results[0][first : first + size])
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_size_and_what_is_no_number_are_as_the_reference_has_them(
    library: Library, method: QuantizationMethod, dtype: torch.dtype
) -> None:
    kernels = NativeKernels(ThreadPool(library, 1))
    weight = some_weight(40, 66, method)
    weight.scales[3] = torch.nan  # of a weight that held one
    bias = randn(40, seed=3)
    x = randn(12, 66, seed=4)
    x[1] = 0.0
    x[2, 5], x[3, 65], x[4, 0] = torch.nan, torch.inf, -torch.inf
    x[5] *= 1e-38
    x[6] *= 1e37
    x[7] *= 1e-30
    x[8] = torch.tensor([-127.0, 0.5, 1.5] * 22)  # halves
    x[9], x[10] = x[9].sign() * 3e38, 2.0**-100
    x = x.to(dtype)
    y = kernels.linear(x, kernels.prepare_quantized_linear(weight, bias, dtype))
    assert same_bits(y, quantized_linear(x, weight, bias))
    assert y[2:5].isnan().all() and y[:, 3].isnan().all()
    others = torch.arange(40) != 3
    assert torch.equal(y[1, others], bias[others]) and torch.equal(y[5, others], bias[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [32, 33])
def test_what_lies_beside_a_rows_inputs_is_no_number_to_it(
    library: Library, method: QuantizationMethod, num_inputs: int, dtype: torch.dtype
) -> None:
    kernels = NativeKernels(ThreadPool(library, 1))
    packed = kernels.prepare_quantized_linear(some_weight(40, num_inputs, method), None, dtype)
    wide = torch.full((3, num_inputs + 5), torch.nan, dtype=dtype)
    wide[:, :num_inputs] = randn(3, num_inputs, seed=2, dtype=dtype)
    x = wide[:, :num_inputs]
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x.contiguous(), packed))


def test_the_largest_sum_that_there_can_be_does_not_overflow(
    library: Library, method: QuantizationMethod
) -> None:
    kernels = NativeKernels(ThreadPool(library, 1))
    numbers = torch.full((2, MAX_INPUTS), -1.0)
    numbers[1, torch.arange(MAX_INPUTS) % 32 > 0] = 1.0  # in int4 they have the largest code
    weight = quantize(numbers, method)
    assert method == "int8" or weight.codes[1, 1:32].eq(15).all()
    packed = kernels.prepare_quantized_linear(weight, None, torch.float32)
    x = torch.stack([torch.ones(MAX_INPUTS), -torch.ones(MAX_INPUTS)])
    assert torch.equal(kernels.linear(x, packed), quantized_linear(x, weight))


@pytest.mark.parametrize("num_inputs", [8, 20, 64, 200])
def test_products_that_are_added_up_in_16_bits_have_room_there(
    library: Library, num_inputs: int
) -> None:
    """Of four inputs sizes come to up to 508; 258 * 127 is too much, of negative ones 257 * 128."""
    sizes = torch.tensor([*range(250, 262), 4 * 127])
    rows = torch.zeros(len(sizes), num_inputs, dtype=torch.int64)
    for place, first in enumerate(range(0, num_inputs - 7, 8)):
        for i, pair in enumerate((0, 1, 4, 5)):  # of eight: what is added up beside 2, 3, 6, 7
            rows[:, first + 2 * (place % 2) + pair] = (sizes + i) // 4
    rows[:, -1] = 127  # so that codes are numbers
    x = torch.cat([rows, -rows, rows * (1 - 2 * (torch.arange(num_inputs) % 2))]).float()
    codes = torch.cat([x.sign(), -x.sign(), torch.ones(3, num_inputs)]).mul(127).to(torch.int8)
    weight = QuantizedWeight("int8", codes, torch.ones(len(codes)))
    kernels = NativeKernels(ThreadPool(library, 1))
    packed = kernels.prepare_quantized_linear(weight, None, torch.float32)
    y = kernels.linear(x, packed)
    assert torch.equal(y.long(), x.long() @ codes.long().T)
    for row in range(len(x)):
        assert torch.equal(kernels.linear(x[row : row + 1], packed), y[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_have_codes_scales_and_biases_of_their_own(
    library: Library, method: QuantizationMethod, dtype: torch.dtype
) -> None:
    kernels = NativeKernels(ThreadPool(library, 2))
    weights = [some_weight(37, 75, method, seed=expert) for expert in range(4)]
    bias = randn(4, 37, seed=2, dtype=dtype)
    logits = randn(50, 4, seed=3)
    logits[:, 2] = -torch.inf  # nobody's
    routed = kernels.route(logits, Routing(2, True, 4))
    x = kernels.permute(randn(50, 75, seed=4, dtype=dtype), routed)
    prepared = kernels.prepare_quantized_experts(weights, bias, dtype)
    y = kernels.grouped_linear(x, prepared, routed)
    starts = routed.starts.tolist()
    for expert, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        right = quantized_linear(x[start:stop], weights[expert], bias[expert])
        assert torch.equal(y[start:stop], right)
    assert starts[2] == starts[3]


def test_a_recorded_product_is_the_same(library: Library, method: QuantizationMethod) -> None:
    kernels = NativeKernels(ThreadPool(library, 2))
    weight = some_weight(70, 96, method)
    packed = kernels.prepare_quantized_linear(weight, None, torch.bfloat16)
    program = RecordedProgram(8)
    x = torch.empty(8, 96, dtype=torch.bfloat16)
    with kernels.recording(program):
        y = kernels.linear(x, packed)
    x[:5] = randn(5, 96, seed=1)
    program.run(kernels.thread_pool, Step(5))
    assert torch.equal(y[:5], quantized_linear(x[:5], weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(60, 300), (1, 1), (9, 32), (3, 31)])
@pytest.mark.parametrize("is_coded", [False, True])
def test_int4_is_found_as_the_reference_finds_it_bit_for_bit(
    library: Library, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, is_coded: bool
) -> None:
    kernels = NativeKernels(ThreadPool(library, 2))
    weight = some_rows(num_outputs, num_inputs, seed=1)
    sizes = torch.tensor([1.0, 1e-3, 0.0, 1e-39, 1e-30, 1e30, 3e38, 1e-44])
    weight *= sizes[torch.arange(num_outputs) % 8].unsqueeze(1)
    weight[num_outputs // 2, num_inputs // 2] = torch.nan
    weight[num_outputs // 3, 0] = -torch.inf
    weight[num_outputs // 4] = 0.3
    weight[num_outputs // 5] = torch.arange(num_inputs) % 11 * 0.2  # codes, not of the whole range
    wide = torch.full((num_outputs, num_inputs + 3), torch.nan, dtype=dtype)
    wide[:, :num_inputs] = weight
    found, right = (
        kernels.quantize(wide[:, :num_inputs], "int4", is_coded=is_coded),
        quantize(weight.to(dtype), "int4", is_coded=is_coded),
    )
    assert torch.equal(found.codes, right.codes)
    assert same_bits(found.scales, right.scales)
    assert found.offsets is not None and right.offsets is not None
    assert same_bits(found.offsets, right.offsets)


@pytest.mark.parametrize(("method", "num_bytes"), [("int8", 64 * (40 + 4)), ("int4", 64 * 2 * 20)])
def test_a_quantized_weight_says_how_much_memory_it_takes(
    library: Library, method: QuantizationMethod, num_bytes: int
) -> None:
    kernels = NativeKernels(ThreadPool(library, 1))
    weight = some_weight(33, 39, method)
    packed = kernels.prepare_quantized_linear(weight, torch.zeros(33), torch.bfloat16)
    assert packed.num_bytes == num_bytes + 33 * 4


def test_rows_of_another_type_than_it_was_prepared_for_are_refused(
    library: Library, method: QuantizationMethod
) -> None:
    kernels = NativeKernels(ThreadPool(library, 1))
    packed = kernels.prepare_quantized_linear(some_weight(4, 4, method), None, torch.float32)
    with pytest.raises(AssertionError, match=r"torch.bfloat16 rows for a weight of torch.float32"):
        kernels.linear(torch.zeros(1, 4).bfloat16(), packed)
