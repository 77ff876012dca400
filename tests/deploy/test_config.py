"""Flags and YAML keys are one schema; what it refuses, it refuses by name."""

from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from deploy.cli import app
from deploy.config import ConfigError, ServeConfig, load_config, parse_bytes


def test_every_key_is_a_flag_and_every_flag_is_a_key() -> None:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {parameter.name for parameter in serve.params} - {"config", "help"}
    assert flags == set(ServeConfig.model_fields)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "topwork.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "tp": 2, "kv_cache_memory": "2GiB"}))
    config = load_config(file, {"tp": "4"})
    assert (config.model, config.tp, config.kv_cache_memory) == ("m", 4, 2 * 2**30)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": "m", "tq": 1}, "tq"),
        ({"model": "m", "tp": 0}, "tp"),
        ({"model": "m", "dtype": "int3"}, "dtype"),
        ({"model": "m", "kv_cache_memory": "lots"}, "kv_cache_memory"),
        ({"model": "m", "adapter": ["nameless"]}, "NAME=DIR"),
        ({"model": "m", "adapter": ["a=x", "a=y"]}, "twice"),
        ({"model": "m", "host": "0.0.0.0"}, "api_key_file"),
        ({}, "model"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, values)


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "topwork.yaml"
    file.write_text("- just\n- a list\n")
    with pytest.raises(ConfigError, match="key: value"):
        load_config(file, {})


@pytest.mark.parametrize(
    ("text", "count"),
    [("512MiB", 2**29), ("2G", 2**31), ("1.5K", 1536), ("77", 77), ("3 tib", 3 * 2**40)],
)
def test_byte_counts_are_read_in_powers_of_1024(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_loopback_needs_no_keys_and_other_hosts_do(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert ServeConfig(model="m", host=host).host == host
    keys = tmp_path / "keys.yaml"
    assert ServeConfig(model="m", host="0.0.0.0", api_key_file=keys).host == "0.0.0.0"
