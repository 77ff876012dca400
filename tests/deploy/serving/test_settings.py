"""What schedulers are told, out of one configuration."""

from math import inf
from pathlib import Path

import pytest

from deploy import engine_config
from deploy.config import ConfigError, ServeConfig
from deploy.engine_config import Checked
from deploy.keys import memory
from deploy.serving import scheduler_deployment, settings
from tests.cluster.adapters.tiny import MODEL
from tests.deploy.checks.small_model import make_model


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


def test_what_a_gpu_has_for_kv_is_not_asked_of_a_node_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it taken for what a CPU has: routers and the head look at the configuration, too."""
    monkeypatch.setattr(memory, "CPU_KV_MEMORY", 1)
    monkeypatch.setattr(settings, "node_ip", lambda: "10.0.0.1")
    monkeypatch.setattr(engine_config, "HEAD_DIMS", range(1, 257))
    model = str(make_model(tmp_path / "model"))
    config = ServeConfig(model=model, device="cuda", max_model_len=200)
    found = settings.check_on_this_node(config)
    assert (found.config, found.device, found.max_model_len) == (config, "cuda", 200)
    assert settings.scheduler_settings(found).rank.kv_memory_bytes is None
    with pytest.raises(ConfigError, match="kv_cache_memory: 1 bytes are too few"):
        settings.check_on_this_node(config.model_copy(update={"device": "cpu"}))


def test_the_ranks_are_told_what_adapters_and_kv_lie_in(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "model"))
    for of_adapters, of_kv in (("auto", "int8"), ("int8", "auto")):
        config = ServeConfig(
            model=model, device="cpu", lora_dtype=of_adapters, kv_cache_dtype=of_kv
        )
        rank = settings.scheduler_settings(settings.check_on_this_node(config)).rank
        assert (rank.lora_dtype, rank.kv_cache_dtype) == (of_adapters, of_kv)


def test_the_autoscaler_aims_at_what_the_ranks_device_runs_at_once() -> None:
    """Also where Serve asks on a node that has none."""
    for device, aim in (("cuda", 256), ("cpu", 64)):
        config = ServeConfig(model="tiny", device=device, max_replicas=2)
        scaling = scheduler_deployment._replica_count(config)["autoscaling_config"]
        assert scaling.target_ongoing_requests == aim
