"""What `topwork check` says a rank takes is what a rank takes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from deploy.config import ServeConfig
from deploy.memory import estimate
from deploy.memory.estimate import Part, largest_layer_page, rank_parts, total
from deploy.memory.weights import ITEM_BYTES, weight_bytes
from kernels.experts import ExpertsWeight, PrepareExperts
from kernels.linear import LinearWeight, Prepare
from kernels.native.backend import NativeKernels
from kernels.native.library import native_library
from kernels.native.packing import PANEL, pack_panels
from kernels.native.program import ThreadPool
from kernels.quantized import QuantizationMethod, Quantizer
from tests.cluster.adapters.tiny import MODEL
from tests.end_to_end.server import MODEL_DIR, adapter_dirs
from tests.end_to_end.tiny_models import make_tiny_model
from tests.worker.classifiers import save_classifier
from tests.worker.models.families.tiny import tiny_family
from worker.model_config_reader import read_model_config
from worker.weights.loader import load_weights
from worker.weights.partition import partition

CPU = torch.device("cpu")


def plain_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Leave a weight as it is, as on a GPU."""
    return LinearWeight(weight, bias, weight.shape[1], weight.shape[0], weight.dtype)


def experts_of(prepare: Prepare) -> PrepareExperts:
    """Return what prepares the weights of experts one by one."""

    def prepare_experts(weight: Tensor, bias: Tensor | None) -> ExpertsWeight:
        num_experts, outputs, inputs = weight.shape
        missing = -outputs % PANEL if prepare is pack_panels else 0
        biases = [None] * num_experts if bias is None else F.pad(bias, (0, missing))
        linears = tuple(prepare(one, own) for one, own in zip(weight, biases, strict=True))
        return ExpertsWeight(linears, num_experts, inputs, outputs, weight.dtype)

    return prepare_experts


FAMILIES = [
    "phi3",
    "olmo2",
    "gemma3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "lfm2",
    "granitemoehybrid",
    "qwen3_5",
    "granitemoehybrid_sparse",
    "qwen3_5_moe",
]  # what Llama has not


def make_model(kind: str, path: Path) -> None:
    """Save a tiny model."""
    if kind in FAMILIES:
        tiny_family(kind).save_pretrained(path)
    else:
        make_tiny_model("llama" if kind == "a classifier" else kind, path)
    if kind == "a classifier":
        save_classifier(AutoModelForCausalLM.from_pretrained(path), path, 7)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "a classifier", *FAMILIES])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.grid("values")
def test_the_weights_of_every_rank_are_told_to_the_byte_if_none_is_coded(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    make_model(kind, tmp_path)
    model = read_model_config(tmp_path)
    for tp in (1, 2, 3):
        for rank in range(tp):
            part = partition(model, tp, rank)
            for is_packed, prepare in ((True, pack_panels), (False, plain_linear)):
                held = load_weights(
                    tmp_path,
                    model,
                    part,
                    getattr(torch, dtype),
                    CPU,
                    prepare,
                    experts_of(prepare),
                )
                told = weight_bytes(model, part, ITEM_BYTES[dtype], is_packed=is_packed)
                assert held.num_bytes == told, (tp, rank, is_packed)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "a classifier", "gpt_oss", "granitemoehybrid"])
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_quantized_weights_of_every_rank_are_told_to_the_byte(
    tmp_path: Path, kind: str, method: QuantizationMethod
) -> None:
    library = native_library()
    if library is None:
        pytest.skip("no native library")
    kernels = NativeKernels(ThreadPool(library, 1))
    make_model(kind, tmp_path)
    model = read_model_config(tmp_path)
    for tp, rank in ((1, 0), (3, 0), (3, 2)):
        part = partition(model, tp, rank)
        quantizer = Quantizer(method, kernels.quantized)
        prepare = kernels.prepare_linear, kernels.prepare_experts, quantizer
        held = load_weights(tmp_path, model, part, torch.float32, CPU, *prepare)
        assert held.num_bytes == weight_bytes(model, part, 4, is_packed=True, method=method)
        if method == "int8":
            exact = partition(model, tp, rank, has_exact_sums=True)
            held = load_weights(tmp_path, model, exact, torch.float32, CPU, *prepare)
            assert held.num_bytes == weight_bytes(model, exact, 4, is_packed=True, method=method)


@pytest.mark.slow  # half a minute
@pytest.mark.model
def test_a_rank_that_has_been_as_busy_as_it_can_be_takes_no_more_than_was_told() -> None:
    """All pages and all rows of both programs have been used by then.

    Measured: 78% of what was told. Weights that can be coded take a quarter less, and rows to look
    tokens up stay in the file's own memory; without coded weights it would be 93%.
    """
    values = {
        "model": str(MODEL_DIR),
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "kv_cache_memory": "32MiB",
        "max_lora_rank": 12,
        "adapter_memory": "16MiB",
        "threads_per_rank": 1,
    }
    command = [sys.executable, "-m", "tests.deploy.busy_rank", json.dumps(values)]
    ran = subprocess.run(
        [*command, *map(str, adapter_dirs().values())], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    busy = json.loads(ran.stdout.splitlines()[-1])
    assert busy["evicted_pages"] > 0, "a page that nobody has used yet takes no memory"
    config = ServeConfig(**values)
    model = read_model_config(MODEL_DIR)
    parts = rank_parts(config, model, 0, "cpu", model.max_position)
    told = total(parts, "host") - named(parts, "process")
    assert 0.7 < busy["took"] / told < 1, (busy, parts)
    assert busy["process"] < named(parts, "process")


def named(parts: tuple[Part, ...], name: str) -> int:
    return next(part.num_bytes for part in parts if part.name == name)


def test_ranks_with_fewer_heads_hold_as_many_but_smaller_pages() -> None:
    config = ServeConfig(model="tiny", tp=2, kv_cache_memory="1MiB")
    first, second = (
        named(rank_parts(config, MODEL, rank, "cpu", 64), "KV cache") for rank in range(2)
    )
    assert second * 2 == first <= 2**20


def test_in_int8_a_budget_has_room_for_nearly_twice_as_many_pages() -> None:
    config = ServeConfig(model="tiny", kv_cache_memory="1GiB")
    small = config.model_copy(update={"kv_cache_dtype": "int8"})
    model = replace(MODEL, head_dim=64)
    half, whole = (largest_layer_page(one, model) for one in (small, config))
    assert whole / half == pytest.approx(2 * 64 / (64 + 2))
    taken = [named(rank_parts(one, model, 0, "cpu", 64), "KV cache") for one in (small, config)]
    assert max(taken) <= 2**30 < min(taken) + model.num_layers * whole


def test_on_a_gpu_only_the_process_and_host_pages_are_in_host_memory() -> None:
    config = ServeConfig(model="tiny", kv_cache_memory=2**29, kv_host_memory="1MiB")
    parts = rank_parts(config, MODEL, 0, "cuda", 64)
    assert {part.name for part in parts if part.place == "host"} == {
        "process",
        "vocabulary of grammars",
        "KV in host memory",
    }
    assert total(parts, "device") > 2**29 + config.adapter_memory
    rest = rank_parts(config.model_copy(update={"kv_cache_memory": None}), MODEL, 0, "cuda", 64)
    assert {part.name for part in parts} - {part.name for part in rest} == {"KV cache"}


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 1), (4, 2), (64, 2)])
def test_a_server_of_its_own_has_two_routers_where_ranks_do_not_miss_the_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr(estimate, "num_cores", lambda: cores)
    assert estimate.num_routers(ServeConfig(model="some/model")) == expected
    assert estimate.num_routers(ServeConfig(model="some/model", routers=3)) == 3
