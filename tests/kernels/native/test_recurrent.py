"""kernels.native recurrent/: states and recurrences by the C library, at once and recorded."""

from collections.abc import Callable, Sequence

import pytest
import torch

from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import RecordedProgram, Step, ThreadPool
from kernels.recurrent.state_runs import StateRun
from tests.kernels.recurrent import cases
from tests.kernels.recurrent.cases import Backend, Case


@pytest.fixture(params=[1, 3])
def backend(library: Library, request: pytest.FixtureRequest) -> Backend:
    return Backend(NativeKernels(ThreadPool(library, request.param)), step_of)


def step_of(num_rows: int, runs: Sequence[StateRun]) -> Step:
    return Step(num_rows, state_runs=runs)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
@pytest.mark.parametrize("check", cases.CHECKS)
def test_a_state_goes_through_the_rows_of_its_sequence(
    check: Callable[[Case, Backend], None], case: Case, backend: Backend
) -> None:
    check(case, backend)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("width", "group_size"), cases.NORMS)
def test_the_gated_norm_is_that_of_float64(
    width: int, group_size: int, dtype: torch.dtype, backend: Backend
) -> None:
    cases.check_gated_norm(backend, width, group_size, dtype)


def test_the_gate_of_a_short_convolution_is_rounded_to_what_a_linear_reads(
    backend: Backend,
) -> None:
    case = cases.ShortConv(3, 300)
    bcx, states = cases.slices(case.widths, 9, torch.float32), cases.pool(case.state_shape)
    runs = step_of(9, [StateRun(0, 9, 3, is_new=False)])
    wide = case.apply(backend, bcx, states.clone(), runs)
    narrow = backend.kernels.short_conv(bcx[0], case.conv.weight, states, runs, torch.bfloat16)
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_a_recorded_op_does_what_it_did_at_once(case: Case, backend: Backend) -> None:
    kernels = backend.kernels
    recorded = RecordedProgram(32)
    inputs, states = cases.slices(case.widths, 32, torch.float32), cases.pool(case.state_shape)
    with kernels.recording(recorded):
        out = case.apply(backend, inputs, states, Step(0))
    steps = (
        (1, [StateRun(0, 1, 2, True)]),
        (32, [StateRun(0, 5, 1, False), StateRun(5, 31, 2, False), StateRun(31, 32, 0, True)]),
        (7, [StateRun(0, 7, 2, False)]),
        (0, []),
    )
    expected_states = states.clone()
    for num_rows, runs in steps:
        step = step_of(num_rows, runs)
        recorded.run(kernels.thread_pool, step)
        own = [part[:num_rows] for part in inputs]
        expected = case.apply(backend, own, expected_states, step)
        assert torch.equal(out[:num_rows], expected)
        assert torch.equal(states, expected_states)


@pytest.mark.parametrize("width", [15, 64, 600])
def test_a_norm_may_go_over_the_features_of_all_ranks(width: int, backend: Backend) -> None:
    cases.check_a_norm_over_ranks(backend, width)
