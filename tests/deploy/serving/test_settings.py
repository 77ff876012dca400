"""What schedulers are told, out of one configuration."""

from math import inf
from pathlib import Path

import pytest

from deploy.config import ServeConfig
from deploy.engine_config import Checked
from deploy.serving import settings
from tests.cluster.adapters.tiny import MODEL


def checked(keys: dict[str, int], cores: int, device: str = "cpu") -> Checked:
    config = ServeConfig.model_validate({"model": "tiny", **keys})
    return Checked(config, Path("tiny"), MODEL, 64, device, config.threads_per_rank or cores)


@pytest.mark.parametrize(
    ("cores", "keys", "device", "rows"),
    [
        (2, {"threads_per_rank": 2}, "cpu", 4),  # whose steps are short
        (2, {"threads_per_rank": 1, "tp": 2}, "cpu", 0),
        (2, {"threads_per_rank": 1}, "cpu", inf),
        (16, {"threads_per_rank": 4, "tp": 2}, "cpu", inf),
        (16, {"threads_per_rank": 16}, "cpu", 4),
        (2, {"threads_per_rank": 2}, "cuda", inf),
        (16, {"overlap": "off"}, "cpu", 0),
        (2, {"overlap": "on", "threads_per_rank": 2}, "cpu", inf),
    ],
)
def test_a_step_is_planned_ahead_where_ranks_leave_a_core_for_it_or_it_is_short(
    monkeypatch: pytest.MonkeyPatch, cores: int, keys: dict[str, int], device: str, rows: float
) -> None:
    monkeypatch.setattr(settings, "num_cores", lambda: cores)
    assert settings.ahead_rows(checked(keys, cores, device)) == rows


@pytest.mark.parametrize(
    ("keys", "hosts", "origins"),
    [
        ({}, (), ()),
        ({"allowed_host": ["LLM.example"]}, ("llm.example",), ()),
        ({"allowed_origin": ["https://UI.example"]}, (), ("https://ui.example",)),
        ({"anonymous": True, "host": "0.0.0.0"}, None, ()),
        ({"anonymous": True, "allowed_host": ["llm"]}, ("llm",), ()),
        ({"api_key_file": "keys.yaml", "allowed_host": ["llm"]}, None, None),
    ],
)
def test_only_servers_without_keys_look_at_who_a_browser_says_it_asks(
    keys: dict[str, object], hosts: tuple[str, ...] | None, origins: tuple[str, ...] | None
) -> None:
    config = ServeConfig.model_validate({"model": "tiny", **keys})
    made = settings.router_config(Checked(config, Path("tiny"), MODEL, 64, "cpu", 1))
    assert (made.allowed_hosts, made.allowed_origins) == (hosts, origins)
