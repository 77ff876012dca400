"""kernels.native shrink.c and expand.c: low-rank deltas of a step's rows, by the slot of each."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.native.library import Library
from tests.kernels.native.lora_cases import (
    BF16,
    F32,
    INT8,
    Adapter,
    Linear,
    poison,
    randn,
    some_adapter,
)

DTYPES = [F32, BF16, INT8]  # of A and B
FORMS = [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16), (BF16, INT8), (F32, INT8)]  # x; A, B


def rows_of(linear: Linear, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y and x."""
    y = randn(num_rows, sum(linear.widths), seed=1)
    return y, randn(num_rows, linear.k, seed=2).to(dtype)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def mixed(library: Library, k: int = 100, dtype: torch.dtype = F32) -> Linear:
    """Return a linear of three modules with five slots, one of them empty."""
    widths = [90, 33, 70]
    ranks = [[3, 0, 8], [16, 16, 16], [0, 5, 0], [1, 64, 7]]
    made = [
        some_adapter(k, widths, rank, 10 * index, dora=index % 2 == 1).to(dtype)
        for index, rank in enumerate(ranks)
    ]
    return Linear(library, k, widths, [made[0], made[1], None, made[2], made[3]])


RUNS = [(4, 0, 1), (0, 1, 8), (2, 8, 10), (3, 12, 61), (1, 61, 70), (4, 70, 200)]
NO_ROWS = [10, 11, 200, 201]  # of no run
NUM_ROWS = 202


@pytest.mark.parametrize(("dtype", "of_lora"), FORMS)
@pytest.mark.parametrize("rank", [1, 3, 8, 16, 64, 200])
@pytest.mark.parametrize(("k", "n"), [(5, 3), (64, 16), (100, 90), (576, 960), (1536, 577)])
def test_a_delta_is_the_product(
    library: Library, k: int, n: int, rank: int, dtype: torch.dtype, of_lora: torch.dtype
) -> None:
    linear = Linear(library, k, [n], [some_adapter(k, [n], [rank], 3, dora=False).to(of_lora)])
    y, x = rows_of(linear, 60, dtype)
    runs = [(0, 0, 1), (0, 1, 4), (0, 5, 60)]
    assert difference(linear.apply(y, x, runs), linear.expected(y, x, runs)) < 1e-6


@pytest.mark.parametrize(("dtype", "of_lora"), FORMS)
def test_slots_of_unequal_ranks_some_with_gains_share_a_step(
    library: Library, dtype: torch.dtype, of_lora: torch.dtype
) -> None:
    linear = mixed(library, dtype=of_lora)
    y, x = rows_of(linear, NUM_ROWS, dtype)
    actual = linear.apply(y, x, RUNS)
    assert difference(actual, linear.expected(y, x, RUNS)) < 1e-6
    assert torch.equal(actual[NO_ROWS], y[NO_ROWS]), "rows of no run"
    assert torch.equal(actual[8:10], y[8:10]), "rows of an empty slot"
    assert torch.equal(actual[1:8, 90:123], y[1:8, 90:123]), "a module left alone"


@pytest.mark.parametrize("has_gain", [True, False])
def test_a_gain_and_a_shift_do_without_each_other(library: Library, has_gain: bool) -> None:
    full = some_adapter(40, [50, 20], [4, 0], 3, dora=True)
    gain, shift = (full.gain, None) if has_gain else (None, full.shift)
    linear = Linear(library, 40, [50, 20], [Adapter(full.a, full.parts, gain, shift)])
    y, x = rows_of(linear, 5, torch.float32)
    runs = [(0, 0, 5)]
    assert difference(linear.apply(y, x, runs), linear.expected(y, x, runs)) < 1e-6


@pytest.mark.parametrize(("dtype", "of_lora"), FORMS)
@pytest.mark.parametrize("k", [100, 1536])
def test_a_row_is_the_same_alone_and_in_any_company(
    library: Library, k: int, dtype: torch.dtype, of_lora: torch.dtype
) -> None:
    linear = mixed(library, k, of_lora)
    y, x = rows_of(linear, NUM_ROWS, dtype)
    together = linear.apply(y, x, RUNS)
    for slot, start, stop in RUNS:
        for row in sorted({start, (start + stop) // 2, stop - 1}):
            alone = linear.apply(y[row : row + 1], x[row : row + 1], [(slot, 0, 1)])
            assert torch.equal(alone[0], together[row])
        for end in range(start + 1, min(stop, start + 27)):
            part = slice(start, end)
            assert torch.equal(
                linear.apply(y[part], x[part], [(slot, 0, end - start)]), together[part]
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_a_row_stands_changes_no_bit(library: Library, dtype: torch.dtype) -> None:
    linear = mixed(library, 576, dtype)
    y, x = rows_of(linear, 60, BF16)
    forward = linear.apply(y, x, [(4, 0, 60)])
    backward = linear.apply(y.flip(0), x.flip(0), [(4, 0, 60)])
    assert torch.equal(forward, backward.flip(0))


@pytest.mark.parametrize(("dtype", "of_lora"), FORMS)
def test_the_number_of_threads_changes_no_bit(
    library: Library, dtype: torch.dtype, of_lora: torch.dtype
) -> None:
    linear = mixed(library, 1536, of_lora)
    y, x = rows_of(linear, NUM_ROWS, dtype)
    one = linear.apply(y, x, RUNS, 1)
    for num_threads in (2, 3):
        for _ in range(5):
            assert torch.equal(linear.apply(y, x, RUNS, num_threads), one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_adapter_is_cut_in_tasks(library: Library, dtype: torch.dtype) -> None:
    widths = [3000, 2111]
    adapter = some_adapter(4100, widths, [77, 64], 3, dora=True).to(dtype)
    linear = Linear(library, 4100, widths, [adapter, None])
    y, x = rows_of(linear, 100, BF16)
    runs = [(0, 0, 1), (1, 1, 2), (0, 2, 100)]
    actual = linear.apply(y, x, runs, 3)
    assert difference(actual, linear.expected(y, x, runs)) < 1e-6
    assert torch.equal(actual, linear.apply(y, x, runs, 1))
    for row in (0, 2, 99):
        alone = linear.apply(y[row : row + 1], x[row : row + 1], [(0, 0, 1)])
        assert torch.equal(alone[0], actual[row])


def test_a_step_without_runs_changes_nothing(library: Library) -> None:
    linear = mixed(library)
    y, x = rows_of(linear, 9, torch.float32)
    assert torch.equal(linear.apply(y, x, [], 2), y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "width"), [(48, 64), (49, 65)])  # 49: odd rows of A start askew
def test_adapters_may_start_at_any_element_and_what_lies_around_them_changes_nothing(
    library: Library, k: int, width: int, dtype: torch.dtype
) -> None:
    full = some_adapter(k, [width], [7], 3, dora=False).to(dtype)
    memory = torch.full((full.a.numel() + 40,), poison(dtype), dtype=dtype)
    shifted = memory[3 : 3 + full.a.numel()].view(full.a.shape).copy_(full.a)
    runs, straight = [(0, 0, 1), (0, 1, 9)], Linear(library, k, [width], [full])
    moved = Linear(library, k, [width], [replace(full, a=shifted)], b_after=5)
    y, x = rows_of(straight, 9, F32 if dtype == INT8 else dtype)
    assert torch.equal(moved.apply(y, x, runs), straight.apply(y, x, runs))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_delta_of_codes_has_the_same_bits_on_all_machines(
    library_of_codes: Library, dtype: torch.dtype
) -> None:
    widths, ranks = [90, 33, 70], [[3, 0, 8], [16, 16, 16], [1, 64, 7]]
    made = [some_adapter(576, widths, one, 3, dora=False).to(INT8) for one in ranks]
    linear = Linear(library_of_codes, 576, widths, made)
    y, x = rows_of(linear, 64, dtype)
    for runs in ([(0, 0, 1), (1, 1, 3), (2, 5, 12)], [(0, 0, 1), (2, 1, 8), (1, 9, 64)]):
        wanted = y.clone()
        for run in runs:
            wanted = linear.expected(wanted, x, [run]).float()
        assert torch.equal(linear.apply(y, x, runs), wanted)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_holds_no_number_spoils_its_own_outputs_alone(
    library: Library, value: float
) -> None:
    adapter = some_adapter(64, [50], [4], 3, dora=False).to(INT8)
    linear = Linear(library, 64, [50], [adapter])
    y, x = rows_of(linear, 5, BF16)
    runs = [(0, 0, 5)]
    whole = linear.apply(y, x, runs)
    x[2, 7] = value
    found = linear.apply(y, x, runs)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], whole[others])
