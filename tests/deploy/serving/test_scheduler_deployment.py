"""deploy.serving.scheduler_deployment: how many schedulers the load asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.serving.scheduler_deployment import desired_replicas


@pytest.mark.parametrize(
    ("requests", "current", "right"),
    [(0, 1, 1), (8, 1, 1), (9, 1, 2), (17, 1, 3), (7, 2, 2), (6, 2, 1), (0, 3, 1), (13, 3, 3)],
)
def test_a_scheduler_is_added_over_capacity_and_goes_when_the_rest_has_capacity_to_spare(
    requests: int, current: int, right: int
) -> None:
    assert desired_replicas(requests, 8, current) == right


@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 20))
def test_the_same_load_never_swings(requests: int, capacity: int, current: int) -> None:
    settled = desired_replicas(requests, capacity, current)
    assert desired_replicas(requests, capacity, settled) == settled
    assert settled * capacity >= requests
