"""kernels.experts: a sparse layer by torch alone."""

from collections.abc import Callable

import pytest
import torch

from kernels.experts import ExpertLoraRun, Routing
from kernels.torch_backend import CpuKernels
from tests.kernels import expert_cases as cases
from tests.kernels.expert_cases import Layer, randn

KERNELS = CpuKernels()
# Experts, hidden, intermediate, experts of a row.
SHAPES = [(8, 64, 96, 2), (5, 33, 31, 1), (13, 48, 40, 13), (1, 16, 8, 1), (128, 32, 24, 8)]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_what_the_reference_says(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    for num_rows in (0, 1, 2, 37):
        cases.check_a_layer_is_what_the_reference_says(KERNELS, Layer.make(*shape, dtype), num_rows)


@pytest.mark.parametrize(
    "check", [cases.check_the_choice, cases.check_weights_add_up_only_if_they_are_renormalized]
)
def test_rows_choose_experts(check: Callable[[CpuKernels], None]) -> None:
    check(KERNELS)


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
    check: Callable[[CpuKernels, Layer], None], dtype: torch.dtype
) -> None:
    check(KERNELS, Layer.make(6, 64, 72, 2, dtype))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_each_pair_gets_the_lora_of_its_rows_adapter_and_its_expert(dtype: torch.dtype) -> None:
    slots = cases.some_slots(6, 48, [40, 40], torch.float32)
    runs = [(0, 0, 5), (2, 5, 9), (1, 12, 20)]
    routed = KERNELS.route(randn(20, 6, seed=1), Routing(3, True, 6))
    x = randn(60, 48, seed=2, dtype=dtype)
    y = randn(60, 80, seed=3)
    expected = y.double() + cases.expected_deltas(x, slots, runs, routed)
    of_kernels = [
        ExpertLoraRun(start, stop, [one and one.segment for one in slots[slot]])
        for slot, start, stop in runs
    ]
    KERNELS.grouped_lora_apply(y, x, of_kernels, routed)
    assert cases.error(y, expected) < 1e-6
