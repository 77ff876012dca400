"""kernels.recurrent.state_runs: which rows are whose."""

import pytest
import torch

from kernels.gpu.batch_metadata import state_numbers
from kernels.recurrent.state_runs import StateRun, check_states, state_at, state_runs


def test_a_sequence_is_new_if_all_its_positions_are_rows() -> None:
    assert state_runs([0, 3, 4, 6], [3, 9, 3], [5, 0, 2]) == (
        StateRun(0, 3, 5, is_new=True),
        StateRun(3, 4, 0, is_new=False),
        StateRun(4, 6, 2, is_new=False),
    )


def test_two_sequences_have_no_page_in_common() -> None:
    with pytest.raises(AssertionError, match="one sequence's"):
        state_runs([0, 1, 2], [1, 1], [3, 3])


def test_a_sequence_has_no_more_rows_than_positions() -> None:
    with pytest.raises(AssertionError, match="2 rows in a context of 1"):
        state_runs([0, 2], [1], [3])


def test_a_new_state_is_zero_and_others_are_copies() -> None:
    states = torch.ones(3, 2, 2)
    states[1] = torch.nan
    assert torch.equal(state_at(states, StateRun(0, 1, 1, is_new=True)), torch.zeros(2, 2))
    state_at(states, StateRun(0, 1, 2, is_new=False)).zero_()
    assert torch.equal(states[2], torch.ones(2, 2))


def test_pages_may_lie_apart_but_not_the_parts_of_one() -> None:
    check_states(torch.zeros(4, 30)[:, :12].unflatten(1, (3, 4)))
    with pytest.raises(AssertionError, match="one piece"):
        check_states(torch.zeros(4, 3, 8)[..., :4])
    with pytest.raises(AssertionError, match="float32"):
        check_states(torch.zeros(4, 3, 8).bfloat16())


def test_a_gpu_finds_the_run_of_a_row_by_a_table() -> None:
    runs, row_runs = state_numbers(6, state_runs([0, 3, 4], [3, 9], [5, 0]))
    assert runs == [(0, 3, 5, 1), (3, 4, 0, 0)]
    assert row_runs == [0, 0, 0, 1, -1, -1]
