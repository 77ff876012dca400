"""Flags and YAML keys are one schema; what it refuses, it refuses by name."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from deploy.cli.aliases import POSITIONAL, parameter_of
from deploy.cli.commands import app
from deploy.config import ConfigError, ServeConfig, json_schema, load_config
from deploy.config_errors import nearest
from deploy.config_values import parse_bytes
from deploy.flag_aliases import ALIASES

ROOT = Path(__file__).parents[2]
OIDC: dict[str, Any] = {
    "oidc_issuer": "https://id.example",
    "oidc_audience": ["topwork"],
    "oidc_rules": "rules.yaml",
}


def test_every_key_is_a_flag_and_every_flag_is_a_key() -> None:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    aliases = {parameter_of(alias) for alias in ALIASES}
    flags = {parameter.name for parameter in serve.params} - {"config", "help", POSITIONAL}
    assert aliases < flags
    assert flags - aliases == set(ServeConfig.model_fields)


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
        ({"model": "m", "lora_dtype": "int4"}, "lora_dtype"),
        ({"model": "m", "kv_cache_memory": "lots"}, "kv_cache_memory"),
        ({"model": "m", "adapter": ["nameless"]}, "NAME=DIR"),
        ({"model": "m", "adapter": ["a=x", "a=y"]}, "twice"),
        ({"model": "m", "host": "0.0.0.0"}, "api_key_file"),
        ({}, "model"),
        ({"model": "m", "tls_key": "/k.pem"}, "tls_key needs tls_cert"),
        ({"model": "m", "trusted_proxy": ["gateway"]}, "trusted_proxy"),
        ({"model": "m", "allowed_host": ["a:80"]}, "allowed_host.*no name of a host"),
        ({"model": "m", "allowed_host": "llm"}, "allowed_host"),
        ({"model": "m", "allowed_origin": ["ui.example"]}, "allowed_origin.*no origin"),
        ({"model": "m", "body_timeout": 0}, "body_timeout"),
        ({"model": "m", "ray_address": "auto", "trusted_proxy": ["10.1.1.1"]}, "topwork environm"),
        ({"model": "m", "oidc_audience": ["a"]}, "oidc_audience needs oidc_issuer"),
        ({"model": "m", "oidc_jwks": "/keys"}, "oidc_jwks needs oidc_issuer"),
        ({"model": "m", **OIDC, "oidc_rules": None}, "oidc_issuer needs oidc_rules"),
        ({"model": "m", **OIDC, "oidc_audience": []}, "oidc_issuer needs oidc_audience"),
        ({"model": "m", **OIDC, "oidc_issuer": "http://id.example"}, "https is wanted"),
        ({"model": "m", **OIDC, "oidc_jwks": "http://id.example"}, "https is wanted"),
        ({"model": "m", **OIDC, "anonymous": True}, "anonymous and oidc_issuer exclude"),
        ({"model": "m", "adapter_sources": ["https://"]}, "the host is malformed"),
        ({"model": "m", "adapter_sources": ["s3://a/../b"]}, "the part"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, values)


def test_adapters_in_int8_are_refused_where_answers_may_not_depend_on_the_number_of_ranks() -> None:
    exact = {"model": "m", "quantization": "int8", "deterministic": True, "tp": 2}
    with pytest.raises(ConfigError, match=r"lora_dtype: in int8 .* set tp to 1"):
        load_config(None, {**exact, "lora_dtype": "int8"})
    others = ({"lora_dtype": "auto"}, {"tp": 1}, {"deterministic": False}, {"quantization": "int4"})
    for other in others:
        load_config(None, {**exact, "lora_dtype": "int8", **other})


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
    assert ServeConfig(model="m", host="0.0.0.0", **OIDC).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tpp", "tp"),
        ("max-loras", "max_loras"),
        ("--port", "port"),
        ("max_lora_ranks", "max_lora_rank"),
        ("tensor_parallel_size", "tp"),
        ("mem-fraction-static", "gpu_memory_utilization"),
        ("Adapter_Dirs", "adapter_dir"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"no such key; did you mean {meant}\\?"):
        load_config(None, {"model": "m", key: 1})


def test_kv_memory_that_is_not_given_is_the_gpus_to_say_and_little_on_a_cpu() -> None:
    for values in ({}, {"kv_cache_memory": "auto"}, {"kv_cache_memory": None}):
        config = load_config(None, {"model": "m", **values})
        assert (config.kv_memory_bytes("cpu"), config.kv_memory_bytes("cuda")) == (2**29, None)
    given = load_config(None, {"model": "m", "kv_cache_memory": "3GiB"})
    assert given.kv_memory_bytes("cpu") == given.kv_memory_bytes("cuda") == 3 * 2**30
    for share in (0, 1.01):
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            load_config(None, {"model": "m", "gpu_memory_utilization": share})


def test_a_key_like_no_other_has_no_nearest_one() -> None:
    assert nearest("zzzzzz", ServeConfig.model_fields) is None
    with pytest.raises(ConfigError, match="zzzzzz: there is no such key; `topwork serve --help`"):
        load_config(None, {"model": "m", "zzzzzz": 1})


def test_an_unknown_flag_is_answered_with_the_nearest_one() -> None:
    said = CliRunner().invoke(app, ["check", "--model", "m", "--max-lora", "3"])
    assert said.exit_code == 2
    assert "--max-loras" in said.output


def test_every_mistake_is_told_with_its_key_its_value_and_what_would_do() -> None:
    with pytest.raises(ConfigError) as told:
        load_config(None, {"model": "m", "tp": 0, "dtype": "int3", "adapter": "a=b", "prot": 1})
    assert str(told.value).splitlines() == [
        "tp: 0 will not do: input should be greater than or equal to 1",
        "dtype: 'int3' will not do: input should be 'bfloat16' or 'float32'",
        "adapter: 'a=b' will not do: input should be a list",
        "prot: there is no such key; did you mean port?",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model: m\nmodel: n\n", "'model' comes twice, again in line 2"),
        ("1: m\n", "the key 1 is no word"),
        ("model: m\ntp: yes\n", "tp: true is for keys that are on or off"),
        ("model: m\nserved_model_name: off\n", "served_model_name: false is for keys"),
        ("model: m\nstep_timeout: .inf\n", "step_timeout: inf will not do: .* finite"),
        ("model: m\nkv_cache_memory: 1.5\n", "kv_cache_memory: 1.5 will not do"),
        ("model: [unclosed\n", "cannot read"),
        ("applications:\n- args: {model: m}\n", "is a Serve config: only what stands under"),
        ("[" * 5000, "cannot read"),
        ("model: m\nlog_level: [/red]\n", "log_level: "),
    ],
)
def test_what_yaml_would_let_pass_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "topwork.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        load_config(file, {})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "topwork.yaml"
    file.write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(file, {})


def test_a_message_is_printed_as_it_is_and_not_as_markup() -> None:
    said = CliRunner().invoke(app, ["check", "--model", "m", "--dtype", "[/red]"])
    assert said.exit_code == 2
    assert "[/red]" in said.stderr


@pytest.mark.parametrize("digits", ["9" * 400, "1." + "1" * 400])
def test_a_byte_count_of_absurd_length_is_refused(digits: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory: not a number of bytes"):
        load_config(None, {"model": "m", "kv_cache_memory": f"{digits}T"})


def test_the_committed_json_schema_is_in_step() -> None:
    """If not: `topwork config-schema > deploy/config.schema.json`."""
    committed = (ROOT / "deploy" / "config.schema.json").read_text()
    assert json.loads(committed) == json_schema()
    assert CliRunner().invoke(app, ["config-schema"]).stdout == committed


@pytest.mark.parametrize(
    ("values", "is_good"),
    [
        ({"model": "m", "tp": 2, "kv_cache_memory": "512MiB", "adapter": ["a=b"]}, True),
        ({"model": "m", "kv_host_memory": 0, "adapter_memory": " 1.5 gib "}, True),
        ({"model": "m", "kv_cache_memory": "auto"}, True),
        ({"model": "m", "adapter_memory": 0}, False),
        ({"model": "m", "kv_cache_memory": "lots"}, False),
        ({"model": "m", "dtype": "int3"}, False),
        ({"model": "m", "tq": 1}, False),
        ({"tp": 1}, False),
    ],
)
def test_the_json_schema_judges_as_the_command_does(
    values: dict[str, object], is_good: bool
) -> None:
    assert jsonschema.Draft202012Validator(json_schema()).is_valid(values) is is_good
    if is_good:
        load_config(None, values)
    else:
        with pytest.raises(ConfigError):
            load_config(None, values)
