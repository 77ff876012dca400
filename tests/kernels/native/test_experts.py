"""kernels.native experts/: a sparse layer by the C library, at once and recorded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.experts import Routing
from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.lora import NativeLora
from kernels.native.program import RecordedProgram, Step, ThreadPool
from tests.kernels import expert_cases as cases
from tests.kernels.expert_cases import Layer, randn

# Experts, hidden, intermediate, experts of a row.
SHAPES = [(8, 64, 96, 2), (5, 33, 31, 1), (13, 48, 40, 13), (1, 16, 8, 1), (128, 32, 24, 8)]


@pytest.fixture
def library(library_of_products: Library) -> Library:
    return library_of_products


@pytest.fixture(params=[1, 3])
def kernels(library: Library, request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(ThreadPool(library, request.param))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_what_the_reference_says(
    kernels: NativeKernels, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    for num_rows in (0, 1, 2, 37):
        cases.check_a_layer_is_what_the_reference_says(kernels, Layer.make(*shape, dtype), num_rows)


@pytest.mark.parametrize(
    "check", [cases.check_the_choice, cases.check_weights_add_up_only_if_they_are_renormalized]
)
def test_rows_choose_experts(
    kernels: NativeKernels, check: Callable[[NativeKernels], None]
) -> None:
    check(kernels)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    "check",
    [
        cases.check_a_row_has_the_same_bits_in_any_company,
        cases.check_a_rows_nan_stays_in_its_row,
        cases.check_ranks_with_experts_of_their_own_add_up,
        cases.check_a_sum_starts_with_what_stands_beside_the_experts,
    ],
)
def test_rows_do_not_see_each_other(
    kernels: NativeKernels, check: Callable[[NativeKernels, Layer], None], dtype: torch.dtype
) -> None:
    check(kernels, Layer.make(6, 64, 72, 2, dtype))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_experts_have_biases_of_their_own(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight, bias = randn(4, 37, 24, seed=1, dtype=dtype), randn(4, 37, seed=2, dtype=dtype)
    routed = kernels.route(randn(30, 4, seed=3), Routing(2, True, 4))
    x = kernels.permute(randn(30, 24, seed=4, dtype=dtype), routed)
    y = kernels.grouped_linear(x, kernels.prepare_experts(weight.clone(), bias), routed)
    starts = routed.starts.tolist()
    for expert, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        right = x[start:stop].double() @ weight[expert].double().T + bias[expert].double()
        assert start < stop and cases.error(y[start:stop], right) < 2e-6


def test_many_rows_of_one_expert_are_more_than_one_block(kernels: NativeKernels) -> None:
    layer = Layer.make(3, 700, 40, 2, torch.bfloat16)
    x, logits = randn(900, 700, seed=1, dtype=torch.bfloat16), randn(900, 3, seed=2)
    logits[:, 1] += 50
    weights = layer.prepared(kernels)
    y = cases.compute(kernels, x, logits, weights, layer.routing)
    for row in (0, 450, 899):
        own = slice(row, row + 1)
        alone = cases.compute(kernels, x[own], logits[own], weights, layer.routing)
        assert torch.equal(y[own], alone)


def lora_of(
    slots: cases.Slots, step: Step, widths: list[int], max_rank: int, dtype: torch.dtype
) -> NativeLora:
    return NativeLora(step, cases.table_of(slots), torch.tensor(widths), max_rank, dtype)


RUNS = [(0, 0, 5), (2, 5, 9), (1, 12, 20)]
WIDTHS = [40, 40]


def products(
    kernels: NativeKernels, x: Tensor, logits: Tensor, layer: Layer, lora: NativeLora
) -> Tensor:
    """Return a layer's output with LoRA on the first of its two linears."""
    gate_up, down = layer.prepared(kernels)
    routed = kernels.route(logits, layer.routing)
    permuted = kernels.permute(x, routed)
    y = kernels.grouped_linear(permuted, gate_up, routed)
    kernels.grouped_lora_apply(y, permuted, lora, routed)
    return kernels.unpermute(
        kernels.grouped_linear(kernels.silu_and_mul(y, x.dtype), down, routed), routed
    )


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_each_pair_gets_the_lora_of_its_rows_adapter_and_its_expert(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    slots = cases.some_slots(6, 48, WIDTHS, dtype)
    routed = kernels.route(randn(20, 6, seed=1), Routing(3, True, 6))
    x = randn(60, 48, seed=2, dtype=dtype)
    y = randn(60, 80, seed=3)
    expected = y.double() + cases.expected_deltas(x, slots, RUNS, routed)
    lora = lora_of(slots, Step(20, runs=RUNS), WIDTHS, 32, dtype)
    kernels.grouped_lora_apply(y, x, lora, routed)
    assert cases.error(y, expected) < 1e-5


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_recorded_layer_does_what_its_ops_did_one_by_one(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    layer = Layer.make(6, 48, 40, 2, dtype)
    slots = cases.some_slots(6, 48, WIDTHS, dtype)
    x, logits = torch.full((32, 48), torch.nan).to(dtype), torch.full((32, 6), torch.nan)
    recorded = RecordedProgram(32)
    with kernels.recording(recorded):
        out = products(kernels, x, logits, layer, lora_of(slots, Step(0), WIDTHS, 32, dtype))
    for num_rows, runs in ((1, []), (32, RUNS), (7, [(1, 0, 7)]), (20, RUNS), (1, [(2, 0, 1)])):
        x[:num_rows] = randn(num_rows, 48, seed=num_rows, dtype=dtype)
        logits[:num_rows] = randn(num_rows, 6, seed=num_rows + 1)
        step = Step(num_rows, runs=runs)
        recorded.run(kernels.thread_pool, step)
        lora = lora_of(slots, step, WIDTHS, 32, dtype)
        rows = x[:num_rows].clone(), logits[:num_rows].clone()
        assert torch.equal(out[:num_rows], products(kernels, *rows, layer, lora))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_row_with_lora_has_the_same_bits_alone(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    layer = Layer.make(6, 48, 40, 2, dtype)
    slots = cases.some_slots(6, 48, WIDTHS, dtype)
    x, logits = randn(20, 48, seed=1, dtype=dtype), randn(20, 6, seed=2)

    def layer_of(first: int, end: int, runs: list[tuple[int, int, int]]) -> Tensor:
        lora = lora_of(slots, Step(end - first, runs=runs), WIDTHS, 32, dtype)
        return products(kernels, x[first:end], logits[first:end], layer, lora)

    everything = layer_of(0, 20, RUNS)
    for slot, start, stop in RUNS:
        for row in range(start, stop):
            assert torch.equal(layer_of(row, row + 1, [(slot, 0, 1)])[0], everything[row])
    assert torch.equal(layer_of(10, 11, [])[0], everything[10])
