"""`topwork check` finds what a server would find, and says what does not fit before it starts."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from rich.console import Console

from deploy.checks.check_command import check_all
from deploy.checks.memory_needs import left_for_kv, needs_of, verdict
from deploy.config import ConfigError, ServeConfig
from deploy.engine_config import Checked
from deploy.machine import Machine
from tests.cluster.adapters.tiny import MODEL
from tests.deploy.checks.small_model import make_model
from tests.end_to_end.server import MODEL_DIR, adapter_dirs
from tests.ports import free_port
from tests.worker.weights.gguf.tiny_models import build
from tests.worker.weights.gguf.writing import write_model

GIB = 2**30
LARGE = Machine(memory=512 * GIB, free_memory=500 * GIB, shared_memory=256 * GIB, gpu_memory=())
CONFIG = ServeConfig(model="tiny", tp=2)


def tiny(config: ServeConfig, device: str = "cpu") -> Checked:
    return Checked(config, Path("tiny"), MODEL, 64, device, 1)


def judged(machine: Machine, config: ServeConfig = CONFIG, device: str = "cpu") -> list[str]:
    checked = tiny(config, device)
    return verdict(checked, needs_of(checked), machine)


def test_a_large_machine_gives_nothing_to_say() -> None:
    assert judged(LARGE) == []


def test_what_no_machine_like_this_can_hold_is_refused_with_the_largest_parts() -> None:
    config = CONFIG.model_copy(update={"kv_cache_memory": 400 * GIB})
    with pytest.raises(ConfigError, match=r"has 524,288 MiB; most of it is KV cache 614,\d+ MiB"):
        judged(LARGE, config)


def test_every_replica_that_there_may_be_counts() -> None:
    config = CONFIG.model_copy(update={"kv_cache_memory": 150 * GIB, "replicas": 2})
    assert judged(LARGE, config) == []
    with pytest.raises(ConfigError, match="memory"):
        judged(LARGE, config.model_copy(update={"max_replicas": 3}))


def test_what_is_taken_at_the_start_and_is_not_free_now_is_a_warning() -> None:
    (warning,) = judged(replace(LARGE, free_memory=GIB))
    assert "needed from the start on" in warning
    assert "only 1,024 MiB are free now" in warning


def test_what_fills_later_may_be_more_than_there_is_with_a_warning() -> None:
    """The defaults leave room for adapters that a small machine with few of them never holds."""
    assert judged(replace(LARGE, memory=8 * GIB, free_memory=8 * GIB)) == []
    (warning,) = judged(replace(LARGE, memory=4 * GIB, free_memory=4 * GIB))
    assert "this host may come to hold" in warning and "adapters in slots 2,048 MiB" in warning


@pytest.mark.parametrize("key", ["adapter_memory", "host_adapter_memory"])
def test_a_budget_that_is_more_than_there_is_is_refused(key: str) -> None:
    config = CONFIG.model_copy(update={key: 600 * GIB})
    with pytest.raises(
        ConfigError, match=r"adapters .* may take \d{3},\d{3} MiB, and this host has"
    ):
        judged(LARGE, config)


def test_an_object_store_that_shared_memory_cannot_hold_is_a_warning() -> None:
    (warning,) = judged(replace(LARGE, shared_memory=64 * 2**20))
    assert "/dev/shm has room for 64 MiB, and Ray's object store takes 1,536 MiB" in warning


def test_ranks_of_a_cluster_need_not_fit_into_this_machine() -> None:
    """A head computes nothing: its nodes may be larger than itself."""
    config = CONFIG.model_copy(update={"kv_cache_memory": 400 * GIB, "ray_address": "auto"})
    assert judged(LARGE, config) == []
    (warning,) = judged(LARGE, config.model_copy(update={"kv_cache_memory": 600 * GIB}))
    assert "a host like this may come to hold" in warning


def test_a_rank_must_fit_into_its_gpu() -> None:
    config = CONFIG.model_copy(update={"kv_cache_memory": 100 * GIB})
    with pytest.raises(ConfigError, match="a GPU would have to hold"):
        judged(replace(LARGE, gpu_memory=(80 * GIB, 80 * GIB)), config, "cuda")
    assert judged(replace(LARGE, gpu_memory=(140 * GIB, 140 * GIB)), config, "cuda") == []


def test_what_a_gpu_leaves_for_kv_is_told_unless_bytes_are_given() -> None:
    checked, machine = tiny(CONFIG, "cuda"), replace(LARGE, gpu_memory=(80 * GIB, 60 * GIB))
    needs = needs_of(checked)
    left = left_for_kv(checked, needs, machine)
    assert left == int(0.9 * 60 * GIB) - needs.on_device and left > 50 * GIB
    assert left_for_kv(checked, needs, LARGE) is None
    given = tiny(CONFIG.model_copy(update={"kv_cache_memory": GIB}), "cuda")
    assert left_for_kv(given, needs_of(given), machine) is None
    assert left_for_kv(tiny(CONFIG, "cpu"), needs, machine) is None


def test_all_but_the_kv_must_fit_into_the_share_of_a_gpu_that_may_be_in_use() -> None:
    config = CONFIG.model_copy(update={"gpu_memory_utilization": 0.01})
    with pytest.raises(ConfigError, match="a GPU of which gpu_memory_utilization gives 1% would"):
        judged(replace(LARGE, gpu_memory=(80 * GIB, 80 * GIB)), config, "cuda")


def test_each_rank_needs_a_gpu_of_its_own() -> None:
    with pytest.raises(ConfigError, match="2 ranks need a GPU each, and this machine has 1"):
        judged(replace(LARGE, gpu_memory=(80 * GIB,)), CONFIG, "cuda")


def test_gpus_that_cannot_be_asked_are_a_warning() -> None:
    (warning,) = judged(LARGE, CONFIG, "cuda")
    assert "nvidia-smi does not say" in warning


def output(config: ServeConfig) -> str:
    console = Console(file=io.StringIO(), width=200)
    check_all(config.model_copy(update={"port": free_port()}), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.model
def test_a_good_configuration_is_told_part_by_part(tmp_path: Path) -> None:
    for name, directory in adapter_dirs().items():
        shutil.copytree(directory, tmp_path / name)
    said = output(ServeConfig(model=str(MODEL_DIR), tp=2, adapter_dir=(str(tmp_path),)))
    for word in ("rank 1", "weights", "KV cache", "object store", "4 adapters", "all good"):
        assert word in said


@pytest.mark.model
def test_every_adapter_at_fault_is_named_those_of_directories_too(tmp_path: Path) -> None:
    source = adapter_dirs()["pirate"]
    for name in ("good", "cut", "wide"):
        shutil.copytree(source, tmp_path / name)
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    config = tmp_path / "wide" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 12', '"r": 512'))
    wrong = ServeConfig(
        model=str(MODEL_DIR), adapter=("absent=/no/such/adapter",), adapter_dir=(str(tmp_path),)
    )
    with pytest.raises(ConfigError) as told:
        output(wrong)
    assert [line.split(":")[0] for line in str(told.value).splitlines()] == [
        "adapter absent",
        "adapter cut",
        "adapter wide",
    ]


@pytest.mark.model
def test_an_adapter_larger_than_the_memory_of_all_is_refused() -> None:
    pirate = adapter_dirs()["pirate"]
    config = ServeConfig(model=str(MODEL_DIR), adapter=(f"pirate={pirate}",), adapter_memory="1MiB")
    with pytest.raises(ConfigError, match=r"all adapters together have 1048576"):
        output(config)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"adapter_dir": ("/no/such/directory",)}, "adapter_dir: there is no directory"),
        ({"adapter_root": ("/no/such/directory",)}, "adapter_root: there is no directory"),
        ({"api_key_file": "/no/such/file"}, "api_key_file: .*No such file"),
        (
            {
                "oidc_issuer": "https://id.example",
                "oidc_audience": ("a",),
                "oidc_rules": "/no/such/file",
            },
            "oidc_rules: .*No such file",
        ),
        ({"record": "/no/such/directory/log"}, "record: there is no directory"),
    ],
)
def test_a_file_or_directory_that_is_not_there_is_refused(
    tmp_path: Path, values: dict[str, object], fault: str
) -> None:
    model = make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=fault):
        output(ServeConfig(model=str(model), **values))


def test_a_model_that_classifies_is_said_to(tmp_path: Path) -> None:
    names = {"architectures": ["LlamaForSequenceClassification"]}
    model = make_model(tmp_path, **names, id2label={"0": "no", "1": "maybe", "2": "yes"})
    told = io.StringIO()
    config = ServeConfig(model=str(model), tp=1, max_model_len=64, port=free_port())
    check_all(config, Console(file=told, width=200))
    assert "no tokens: it classifies, 3 labels, softmax" in told.getvalue()
    assert "temperature" not in told.getvalue() and "all good" in told.getvalue()


def test_a_gguf_file_is_checked_as_a_directory_is(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = build("llama")
    write_model(path, model, "llama", Type.Q8_0)
    make_model(tmp_path / "other", vocab_size=model.config.vocab_size)
    said = io.StringIO()
    config = ServeConfig(model=str(path), port=free_port(), kv_cache_memory=2**24)
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.model: it is missing"):
        check_all(config, Console(file=said, width=200))
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    kept = {token: number for token, number in vocabulary.items() if number < 131}
    tokenizer["model"]["vocab"] = kept
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    checked = check_all(config, Console(file=said, width=200))
    assert checked.model_dir == path
    assert "its linears are quantized (gguf) and are widened to bfloat16" in said.getvalue()
    assert f"llama model in {path}" in said.getvalue()
