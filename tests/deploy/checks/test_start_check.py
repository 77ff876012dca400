"""Every mistake in a configuration, a model's files or a path is told in one line of its own."""

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from deploy.checks.address_checks import look_at_addresses
from deploy.checks.file_checks import look_at_files
from deploy.checks.start_check import Start, look, outline_adapters
from deploy.checks.tls_check import look_at_certificate
from deploy.config import ConfigError, ServeConfig
from tests.deploy.certificates import DAY, write_certificate
from tests.deploy.checks.small_model import make_model, shard
from tests.deploy.checks.spoilt_models import BY_HEADERS, BY_TOKENIZER, content
from tests.ports import free_port
from tests.worker.quantization.packing import FORMATS, quantize_checkpoint

QUICK = ("no tokenizer", "tokenizer is cut", "tokens beyond the embedding")


def looked(model: Path, **values: Any) -> Start:
    return look(ServeConfig(model=str(model), port=free_port(), **values), outline_adapters)


def told(model: Path, **values: Any) -> list[str]:
    """Return the lines that are said of a configuration."""
    with pytest.raises(ConfigError) as raised:
        looked(model, **values)
    return str(raised.value).splitlines()


def of_files(**values: Any) -> list[str]:
    """Return what is said of the files of a configuration."""
    return [one.text for one in look_at_files(ServeConfig(model="m", **values))]


def of_addresses(**values: Any) -> list[str]:
    return [one.text for one in look_at_addresses(ServeConfig(model="m", **values))]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_whole_model_has_no_mistake(tmp_path: Path, is_sharded: bool) -> None:
    model = make_model(tmp_path / "model")
    if is_sharded:
        shard(model)
    start = looked(model, tp=2)
    assert (start.checked.max_model_len, start.warnings) == (256, ())


@pytest.mark.parametrize(
    "kind",
    [
        *BY_HEADERS,
        *QUICK,  # each of them loads a tokenizer in a process of its own
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in BY_TOKENIZER if kind not in QUICK),
    ],
)
def test_a_model_that_cannot_be_served_is_told_in_one_line(tmp_path: Path, kind: str) -> None:
    spoil, fault = (BY_HEADERS | BY_TOKENIZER)[kind]
    model = make_model(tmp_path / "model")
    spoil(model)
    (line,) = told(model)
    assert line.startswith("model: ") and fault in line and line.isprintable()
    assert len(line) < 1100


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ raise_exception('only\nfor experts') }}", "refuses: only for experts, of a plain"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "time"),
    ],
    ids=["refuses", "endless"],
)
def test_a_template_that_refuses_a_plain_question_is_a_warning(
    tmp_path: Path, template: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    content("chat_template.jinja", template)(model)
    if fault == "time":
        monkeypatch.setattr("deploy.checks.start_check.TOKENIZER_TIMEOUT", 3.0)
        (line,) = told(model)
        assert "tokenizer: to load and to try it takes more than 3 s" in line
    else:
        (warning,) = looked(model).warnings
        assert fault in warning


def test_a_model_without_a_template_is_served(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    assert looked(model).warnings == ()


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"tp": 5}, "model: tensor-parallel size 5 is too large"),
        ({"max_model_len": 257}, "max_model_len: 257 is over the model's 256"),
        ({"kv_cache_memory": "1KiB"}, "kv_cache_memory: 1024 bytes are too few: a page of 64 to"),
        ({"kv_cache_memory": "8KiB", "max_model_len": 200}, "hold 128 tokens, less than max_mode"),
        ({"kv_host_memory": "1KiB"}, "kv_host_memory: 1024 bytes are too few"),
        ({"kv_cache_memory": "900TiB"}, "memory: this host would have to hold"),
        ({"adapter_memory": "900TiB"}, "memory: adapters in slots may take"),
        ({"host_adapter_memory": "900TiB"}, "memory: object store with the adapters"),
        ({"routers": 10**9}, "memory: this host would have to hold"),
        ({"max_num_batched_tokens": 10**12}, "memory: steps may take"),
        ({"max_num_seqs": 10**9, "max_num_batched_tokens": 10**12}, "memory: steps may take"),
        ({"max_num_seqs": 256}, "max_num_batched_tokens, max_num_seqs, page_size: "),
        ({"adapter": ("a=/no/adapter",)}, "adapter a: No adapter found for /no/adapter"),
        ({"adapter": ("?=/no/adapter",)}, "adapter ?: '?' cannot name an adapter"),
        ({"adapter": ("base=/no/adapter",)}, "adapter base: 'base' is the name of the base model"),
        ({"ray_address": "127.0.0.1:1"}, "ray_address: nothing answers at 127.0.0.1:1"),
        ({"ray_address": "a" * 300 + ":1"}, "ray_address: nothing answers at aaa"),
    ],
)
def test_what_no_model_of_this_size_or_no_machine_can_do_is_told_in_one_line(
    tmp_path: Path, values: dict[str, Any], fault: str
) -> None:
    (line,) = told(make_model(tmp_path / "model"), **values)
    assert fault in line and line.isprintable()


def test_mistakes_that_do_not_depend_on_each_other_are_told_together(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    lines = told(model, adapter=("a=/no/a", "b=/no/b"), adapter_dir=("/no/c",), record="/no/d/e")
    assert [line.partition(":")[0] for line in lines] == [
        *("adapter_dir", "record", "adapter a", "adapter b"),
        "model",
    ]


def test_kv_memory_for_less_than_the_models_own_length_is_a_warning(tmp_path: Path) -> None:
    (warning,) = looked(make_model(tmp_path / "model"), kv_cache_memory="8KiB").warnings
    assert "has room for 128 tokens, and the model's longest context is 256" in warning


def test_weights_that_are_widened_are_a_warning(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    quantize_checkpoint(model, *FORMATS["gptq"])
    (warning,) = looked(model).warnings
    assert "its linears are quantized (gptq) and are widened to bfloat16" in warning
    (warning,) = looked(model, quantization="int8").warnings
    assert "(gptq) and are quantized once more to int8" in warning
    (warning,) = looked(model, quantization="int4").warnings
    assert "are loaded: codes of 4 bits whose scales 32 inputs in turn share are found" in warning


def test_what_only_other_nodes_of_a_cluster_have_is_a_warning(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        warnings = looked(
            model, ray_address=address, adapter=("a=/no/a",), record="/no/b/c", adapter_dir=("/d",)
        ).warnings
    assert len(warnings) == 3
    assert all(warning.startswith("on this machine, ") for warning in warnings)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "[{key: abcdefgh, tenant: a}, {key: abcdefgh, tenant: b}]",
            "0 and 1 are the same key, of",
        ),
        (
            "[{key: abcdefgh, tenant: a}, {tenant: a, key_sha256: "
            "9C56CC51B374C3BA189210D5B6D4BF57790D351C96C47C02190ECF1E430635AB}]",
            "0 and 1 are the same key, of tenant 'a'",
        ),
        ("[{key: abc, tenant: a}]", "0.key: String should have at least 8"),
        ("[", "is not YAML at line 1"),
        ("", "Input should be a valid list"),
        ("[" * 80, "recursion"),
        ("2026-99-99", "month must be"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_told_in_one_line(
    tmp_path: Path, text: str, fault: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    (line,) = of_files(api_key_file=file)
    assert line.startswith("api_key_file: ") and fault in line and line.isprintable()
    assert "abcdefgh" not in line


def test_a_certificate_that_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, valid=(-2 * DAY, -DAY))
    for values, fault in (
        ({"tls_cert": cert, "tls_key": key}, "has expired at "),
        ({"tls_cert": cert, "tls_key": "/no/key"}, "No such file or directory: '/no/key'"),
    ):
        told = [one.text for one in look_at_certificate(ServeConfig(model="m", **values))]
        (line,) = told
        assert line.startswith("tls_cert: ") and fault in line and line.isprintable()
    write_certificate(tmp_path)
    good = ServeConfig(model="m", tls_cert=cert, tls_key=key)
    assert not list(look_at_certificate(good))


def test_files_and_directories_that_are_not_what_they_should_be_are_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xfe")
    (tmp_path / "events").write_bytes(b"topwork event")  # a first line that was torn
    assert of_files(api_key_file="/no/keys") == [
        "api_key_file: [Errno 2] No such file or directory: '/no/keys'"
    ]
    assert of_files(api_key_file=file) == [f"api_key_file: {file} is no text"]
    assert of_files(api_key_file=tmp_path)[0].startswith("api_key_file: [Errno 21]")
    assert of_files(adapter_dir=(str(file), str(tmp_path)), adapter_root=("/no/x",)) == [
        f"adapter_dir: there is no directory {file}",
        "adapter_root: there is no directory /no/x",
    ]
    assert of_files(adapter_dir=("a" * 5000,))[0].startswith("adapter_dir: [Errno 36]")
    assert of_files(record="/no/x/y") == ["record: there is no directory /no/x"]
    assert of_files(record=tmp_path) == [f"record: {tmp_path} is not a regular file"]
    assert of_files(record=file) == [f"record: {file} holds something else than recorded events"]
    assert of_files(record=tmp_path / "events") == of_files(record=tmp_path / "new") == []
    assert of_files(adapter_state=tmp_path / "state") == []
    assert of_files(adapter_staging=tmp_path / "new" / "staging") == []
    assert of_files(adapter_staging=file) == [f"adapter_staging: {file} is not a directory"]
    assert of_files(adapter_staging=file / "x")[0].startswith(f"adapter_staging: {file} is not a")
    assert not (tmp_path / "new").exists() and not (tmp_path / "state").exists()
    (line,) = of_files(adapter_state=file)
    assert line.startswith(f"adapter_state: adapter state {file} was not written by this version")


def test_what_this_user_must_not_touch_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may everything
    assert of_files(adapter_dir=(str(tmp_path),), record=tmp_path / "x") == [
        f"adapter_dir: {tmp_path} cannot be read by this user",
        f"record: {tmp_path} cannot be written to by this user",
    ]


def test_a_recording_that_another_process_writes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.checks.file_checks.LOCK_PATIENCE", 0.1)
    record = tmp_path / "events"
    with record.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert of_files(record=record) == [f"record: {record} is being written by another process"]


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (line,) = of_addresses(port=port)
        assert line == f"port: 127.0.0.1:{port} is taken; end what listens there, or take another"
        endpoint = f"tcp://127.0.0.1:{port}"
        (line,) = of_addresses(port=free_port(), kv_events_endpoint=endpoint)
        assert line.startswith(f"kv_events_endpoint: 127.0.0.1:{port} is taken")
    assert of_addresses(port=port) == []


def test_two_keys_cannot_have_the_same_port() -> None:
    port = free_port()
    (line,) = of_addresses(port=port, kv_events_endpoint=f"tcp://127.0.0.1:{port}")
    assert line.startswith(f"kv_events_endpoint: 127.0.0.1:{port} is taken")


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"host": "192.0.2.1"}, "host: cannot bind 192.0.2.1:"),
        ({"host": "no-such-host.invalid"}, "host: cannot bind no-such-host.invalid:"),
        ({"host": "a" * 300}, "host: cannot bind aaa"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:99999"}, "kv_events_endpoint: cannot bind 127.0"),
        (
            {"kv_events_endpoint": "tcp://127.0.0.1:65535", "replicas": 2},
            "kv_events_endpoint: cannot bind 127.0.0.1:65536: ",
        ),
    ],
)
def test_an_address_that_cannot_be_bound_is_told(values: dict[str, Any], fault: str) -> None:
    (line,) = of_addresses(port=free_port(), anonymous=True, **values)
    assert line.startswith(fault) and line.isprintable()
