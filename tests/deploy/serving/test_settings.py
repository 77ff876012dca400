"""What schedulers are told, out of one configuration."""

from math import inf
from pathlib import Path

import pytest

from deploy.check import Checked
from deploy.config import ServeConfig
from deploy.serving import settings
from tests.cluster.adapters.tiny import MODEL


def on_machine(monkeypatch: pytest.MonkeyPatch, cores: int, *, has_bf16: bool) -> None:
    monkeypatch.setattr(settings, "num_cores", lambda: cores)
    monkeypatch.setattr(settings, "multiplies_bf16", lambda: has_bf16)


def checked(keys: dict[str, int], cores: int, device: str = "cpu") -> Checked:
    config = ServeConfig.model_validate({"model": "tiny", **keys})
    return Checked(config, Path("tiny"), MODEL, 64, device, config.threads_per_rank or cores)


@pytest.mark.parametrize(
    ("cores", "keys", "device", "rows"),
    [
        (2, {"threads_per_rank": 2}, "cpu", 4),  # few rows leave one of the two cores
        (2, {"threads_per_rank": 1, "tp": 2}, "cpu", 0),
        (2, {"threads_per_rank": 1}, "cpu", inf),
        (16, {"threads_per_rank": 4, "tp": 2}, "cpu", inf),
        (16, {"threads_per_rank": 16}, "cpu", 0),
        (2, {"threads_per_rank": 2}, "cuda", inf),
        (16, {"overlap": "off"}, "cpu", 0),
        (2, {"overlap": "on", "threads_per_rank": 2}, "cpu", inf),
    ],
)
def test_a_step_is_planned_ahead_where_ranks_leave_a_core_for_it(
    monkeypatch: pytest.MonkeyPatch, cores: int, keys: dict[str, int], device: str, rows: float
) -> None:
    on_machine(monkeypatch, cores, has_bf16=True)
    assert settings.ahead_rows(checked(keys, cores, device)) == rows


@pytest.mark.parametrize(
    ("cores", "keys", "has_bf16", "rows"),
    [
        (2, {"threads_per_rank": 2}, True, 4),
        (2, {"threads_per_rank": 2}, False, 2),
        (4, {"threads_per_rank": 2}, True, 2),  # others have cores of their own
        (2, {"threads_per_rank": 1, "tp": 2}, True, 2),
    ],
)
def test_one_thread_computes_more_rows_alone_where_two_would_take_all_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, keys: dict[str, int], has_bf16: bool, rows: int
) -> None:
    on_machine(monkeypatch, cores, has_bf16=has_bf16)
    assert settings.alone_rows(checked(keys, cores)) == rows
