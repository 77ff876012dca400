"""deploy.serving.scaling: how many schedulers the load asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.serving.scaling import wanted


@pytest.mark.parametrize(
    ("requests", "current", "right"),
    [(0, 1, 1), (8, 1, 1), (9, 1, 2), (17, 1, 3), (7, 2, 2), (6, 2, 1), (0, 3, 1), (13, 3, 3)],
)
def test_one_more_comes_with_more_requests_than_seats_and_goes_when_there_are_seats_to_spare(
    requests: int, current: int, right: int
) -> None:
    assert wanted(requests, 8, current) == right


@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 20))
def test_the_same_load_never_swings(requests: int, seats: int, current: int) -> None:
    settled = wanted(requests, seats, current)
    assert wanted(requests, seats, settled) == settled
    assert settled * seats >= requests
