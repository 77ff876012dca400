"""kernels.recurrent: states and recurrences by torch alone."""

from collections.abc import Callable

import pytest
import torch

from kernels.torch_backend import CpuKernels
from tests.kernels.recurrent import cases
from tests.kernels.recurrent.cases import Backend, Case


def backend(dtype: torch.dtype) -> Backend:
    return Backend(CpuKernels(), lambda _, runs: runs, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
@pytest.mark.parametrize("check", cases.CHECKS)
def test_a_state_goes_through_the_rows_of_its_sequence(
    check: Callable[[Case, Backend], None], case: Case, dtype: torch.dtype
) -> None:
    check(case, backend(dtype))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("width", "group_size"), cases.NORMS)
def test_the_gated_norm_is_that_of_float64(width: int, group_size: int, dtype: torch.dtype) -> None:
    cases.check_gated_norm(backend(dtype), width, group_size, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("width", [15, 64, 600])
def test_a_norm_may_go_over_the_features_of_all_ranks(width: int, dtype: torch.dtype) -> None:
    cases.check_a_norm_over_ranks(backend(dtype), width)
