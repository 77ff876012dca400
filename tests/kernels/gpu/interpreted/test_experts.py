"""kernels.gpu.experts: a sparse layer on a GPU."""

from collections.abc import Callable

import pytest
import torch

from kernels.experts import Routing
from kernels.gpu.backend import GpuKernels
from kernels.gpu.batch_metadata import ExpertLoraMetadata
from tests.kernels import expert_cases as cases
from tests.kernels.expert_cases import Layer, randn
from tests.kernels.gpu.bounds import reachable

KERNELS = GpuKernels(deterministic=True)
# Experts, hidden, intermediate, experts of a row.
SHAPES = [(8, 64, 96, 2), (5, 33, 31, 1), (13, 48, 40, 13), (1, 16, 8, 1)]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_what_the_reference_says(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    for num_rows in (0, 1, 19):
        cases.check_a_layer_is_what_the_reference_says(KERNELS, Layer.make(*shape, dtype), num_rows)


@pytest.mark.parametrize(
    "check", [cases.check_the_choice, cases.check_weights_add_up_only_if_they_are_renormalized]
)
def test_rows_choose_experts(check: Callable[[GpuKernels], None]) -> None:
    check(KERNELS)


@pytest.mark.usefixtures("dots_are_chains")
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
    check: Callable[[GpuKernels, Layer], None], dtype: torch.dtype
) -> None:
    check(KERNELS, Layer.make(6, 64, 72, 2, dtype))


@pytest.mark.usefixtures("dots_are_chains")
def test_large_tiles_have_the_bits_of_small_ones() -> None:
    layer = Layer.make(1, 32, 16, 1, torch.bfloat16)
    x, logits = randn(300, 32, seed=1, dtype=torch.bfloat16), torch.zeros(300, 1)
    weights = layer.prepared(KERNELS)
    y = cases.compute(KERNELS, x, logits, weights, layer.routing)
    for rows in (slice(0, 1), slice(200, 230)):
        few = cases.compute(KERNELS, x[rows], logits[rows], weights, layer.routing)
        assert torch.equal(y[rows], few)


def test_more_pairs_than_a_program_takes_at_once_are_sorted() -> None:
    routed = KERNELS.route(randn(700, 5, seed=1), Routing(2, True, 5))
    starts, rows = routed.starts.tolist(), routed.rows.tolist()
    assert starts[0] == 0 and starts[-1] == 1400
    for first, end in zip(starts, starts[1:], strict=False):
        assert rows[first:end] == sorted(set(rows[first:end]))
    assert torch.equal(
        routed.rows[routed.positions.flatten()], torch.arange(700).repeat_interleave(2)
    )


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_each_pair_gets_the_lora_of_its_rows_adapter_and_its_expert(dtype: torch.dtype) -> None:
    slots = cases.some_slots(3, 48, [40, 40], dtype)
    runs = [(0, 0, 5), (2, 5, 30), (1, 33, 40), (0, 40, 41)]
    row_slots = torch.full((45,), -1, dtype=torch.int32)
    for slot, start, stop in runs:
        row_slots[start:stop] = slot
    routed = KERNELS.route(randn(45, 3, seed=1), Routing(2, True, 3))
    x = randn(90, 48, seed=2, dtype=dtype)
    y = randn(90, 80, seed=3)
    expected = y.double() + cases.expected_deltas(x, slots, runs, routed)
    lora = ExpertLoraMetadata(row_slots, cases.table_of(slots), (40, 40), dtype, 32)
    segments = [one.segment for of_slot in slots for one in of_slot if one is not None]
    with reachable(*(tensor for one in segments for tensor in (one.a, one.b))):
        KERNELS.grouped_lora_apply(y, x, lora, routed)
    assert cases.error(y, expected) < 1e-4
