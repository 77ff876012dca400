"""Limits that make no sense are refused by name."""

import pytest

from cluster.scheduler.config import SchedulerConfig


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 0}, "page_size"),
        ({"max_running": 0}, "max_running"),
        ({"num_slots": -1}, "num_slots"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"token_budget": 79}, "token_budget 79"),
        ({"max_chunk": 15}, "max_chunk"),
    ],
)
def test_a_limit_under_which_work_could_starve_is_refused(
    change: dict[str, int], reason: str
) -> None:
    settings = {"num_pages": 8, "page_size": 16, "max_model_len": 64} | change
    with pytest.raises(ValueError, match=reason):
        SchedulerConfig(base_digest="m", **settings)  # type: ignore[arg-type]


def test_the_longest_sequence_is_bounded_by_the_context_and_by_the_pool() -> None:
    config = SchedulerConfig(base_digest="m", num_pages=2, page_size=16, max_model_len=64)
    assert config.token_limit == 32
