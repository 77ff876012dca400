"""kernels.gpu.recurrent: states and recurrences on a GPU."""

from collections.abc import Callable, Sequence

import pytest
import torch

from kernels.gpu.backend import GpuKernels
from kernels.gpu.batch_metadata import StateMetadata, state_numbers
from kernels.recurrent.state_runs import StateRun
from tests.kernels.recurrent import cases
from tests.kernels.recurrent.cases import Backend, Case

# One block of channels and two, heads of one block of columns and of two, and none that is whole.
CASES: tuple[Case, ...] = (
    cases.Conv(4, 64),
    cases.Conv(2, 5, has_bias=False),
    cases.Conv(3, 260, has_silu=False),
    cases.ShortConv(3, 40),
    cases.Scan(2, 1, 16, 16),
    cases.Scan(4, 2, 12, 5, dt_limit=(0.3, 1.0)),
    cases.Scan(1, 1, 24, 64),
    cases.Delta(1, 2, 16, 8),
    cases.Delta(1, 1, 64, 24),
    cases.Delta(2, 4, 12, 5),
)


def metadata(num_rows: int, runs: Sequence[StateRun]) -> StateMetadata:
    """Return the runs with one behind them that there is none of, as a graph has."""
    of_runs, row_runs = state_numbers(num_rows, runs)
    of_runs = [*of_runs, (0, 0, cases.PAGES, 0)]
    return StateMetadata(
        torch.tensor(of_runs, dtype=torch.int32), torch.tensor(row_runs, dtype=torch.int32)
    )


def backend(dtype: torch.dtype) -> Backend:
    return Backend(GpuKernels(deterministic=True), metadata, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("check", cases.CHECKS)
def test_a_state_goes_through_the_rows_of_its_sequence(
    check: Callable[[Case, Backend], None], case: Case, dtype: torch.dtype
) -> None:
    check(case, backend(dtype))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("width", "group_size"), cases.NORMS)
def test_the_gated_norm_is_that_of_float64(width: int, group_size: int, dtype: torch.dtype) -> None:
    cases.check_gated_norm(backend(dtype), width, group_size, dtype)


def test_rows_that_are_nobodys_change_no_state() -> None:
    case = cases.Conv(4, 40)
    inputs, states = cases.slices(case.widths, 6, torch.float32), cases.pool(case.state_shape)
    run = StateRun(0, 4, 3, is_new=False)
    alone = states.clone()
    short = [part[:4] for part in inputs]
    y = case.apply(backend(torch.float32), short, alone, metadata(4, [run]))
    padded = case.apply(backend(torch.float32), inputs, states, metadata(6, [run]))
    assert torch.equal(padded[:4], y) and torch.equal(states, alone)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", [15, 64, 600])
def test_a_norm_may_go_over_the_features_of_all_ranks(width: int, dtype: torch.dtype) -> None:
    cases.check_a_norm_over_ranks(backend(dtype), width)
