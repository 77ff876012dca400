"""The commands themselves: a mistake is one line and exit code 2, and nothing is started."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.checks.small_model import make_model
from tests.deploy.checks.spoilt_models import BY_HEADERS, BY_TOKENIZER
from tests.ports import free_port

TOPWORK = Path(sys.executable).with_name("topwork")
# Of the tables, which other tests go through, those that the review of the first release met.
SPOILT = ["weights are cut", "a tensor is missing", "a wrong shape", "no tokenizer"]

FLAGS: dict[str, tuple[list[str], str]] = {
    "model": (["--model", "/no/model"], "model: no such directory"),
    "tp": (["--tp", "5"], "model: tensor-parallel size 5"),
    "little KV": (["--kv-cache-memory", "1KiB"], "kv_cache_memory: 1024 bytes are too few"),
    "much KV": (["--kv-cache-memory", "900TiB"], "memory: this host would have to hold"),
    "host memory": (["--host-adapter-memory", "900TiB"], "memory: object store with the"),
    "host": (["--host", "192.0.2.1", "--anonymous"], "host: cannot bind 192.0.2.1"),
    "adapters": (["--adapter-dir", "/no/directory"], "adapter_dir: there is no directory"),
    "adapter": (["--adapter", "a=/no/adapter"], "adapter a: No adapter found"),
    "keys": (["--api-key-file", "/no/file"], "api_key_file: [Errno 2]"),
    "record": (["--record", "/no/directory/log"], "record: there is no directory"),
    "cluster": (["--ray-address", "127.0.0.1:1"], "ray_address: nothing answers"),
    "traces": (["--otlp-traces-endpoint", "localhost:4317"], "otlp_traces_endpoint: 'localhost"),
    "value": (["--kv-cache-memory", "much"], "kv_cache_memory: not a number of bytes"),
}

# The command starts a process each time, and what it asks is asked by other tests as well.
QUICK = ("value",)


def run(command: str, model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `topwork check` or `topwork serve`, which is to end by itself."""
    arguments = [str(TOPWORK), command, "--model", str(model), "--port", str(free_port()), *flags]
    # A Ray that is started makes its files there.
    environment = {**os.environ, "RAY_TMPDIR": str(model.parent / "ray"), "COLUMNS": "80"}
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=60, env=environment, check=False
    )


def assert_is_told(ran: subprocess.CompletedProcess[str], model: Path, fault: str) -> None:
    assert ran.returncode == 2, ran
    assert re.fullmatch(r"error [^\n]*\n", ran.stderr), ran.stderr
    assert fault in ran.stderr and not ran.stdout
    assert not (model.parent / "ray").exists(), "Ray was started"


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("serve", "weights are cut"),
        ("check", "no tokenizer"),
        *(
            pytest.param(command, kind, marks=pytest.mark.slow)
            for command in ("check", "serve")
            for kind in SPOILT
            if (command, kind) not in (("serve", "weights are cut"), ("check", "no tokenizer"))
        ),
    ],
)
def test_a_broken_model_ends_the_command_with_one_line(
    tmp_path: Path, command: str, kind: str
) -> None:
    model = make_model(tmp_path / "model")
    spoil, fault = (BY_HEADERS | BY_TOKENIZER)[kind]
    spoil(model)
    assert_is_told(run(command, model), model, fault)


# Both ask the same function, which other tests go through: one of the two is enough for most.
@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *(("serve", kind) for kind in QUICK),
        *(
            pytest.param("serve", kind, marks=pytest.mark.slow)
            for kind in FLAGS
            if kind not in QUICK
        ),
        *(pytest.param("check", kind, marks=pytest.mark.slow) for kind in ("keys", "much KV")),
    ],
)
def test_a_wrong_flag_ends_the_command_with_one_line(
    tmp_path: Path, command: str, kind: str
) -> None:
    model = make_model(tmp_path / "model")
    flags, fault = FLAGS[kind]
    assert_is_told(run(command, model, *flags), model, fault)


def test_a_good_model_is_all_good(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    ran = run("check", model)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "all good" in ran.stdout
    assert not (tmp_path / "ray").exists()


@pytest.mark.slow  # each is a process that loads all
def test_a_command_line_of_vllm_is_taken_as_it_stands(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    flags = ["--tensor-parallel-size", "2", "--enable-lora", "--max-lora-rank", "32"]
    flags += ["--no-enable-prefix-caching", "--block-size", "32", "--max-num-seqs", "8"]
    ran = subprocess.run(
        [str(TOPWORK), "check", str(model), "--port", str(free_port()), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert (
        ran.stderr == "note --enable-lora: nothing is needed for it: adapters are always served\n"
    )
    assert "all good" in ran.stdout


def test_a_check_without_adapters_imports_neither_ray_nor_torch(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    code = (
        "import sys; sys.modules['ray'] = sys.modules['torch'] = None; "
        "from deploy.cli.commands import app; "
        f"app(['check', '--model', {str(model)!r}, '--port', '{free_port()}'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
