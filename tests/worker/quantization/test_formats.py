"""Quantized checkpoints are read as what they mean, by any rank of any number."""

import copy
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.peft_adapters import by_peft, error, make_adapter_dir, read
from tests.worker.quantization.packing import FORMATS, quantize_checkpoint
from worker.model_config_reader import read_model_config
from worker.quantization.config import read_quantization
from worker.spans import Span
from worker.weights import checkpoint as weights_checkpoint
from worker.weights.checkpoint import Checkpoint, read_weight
from worker.weights.checkpoint_files import check_checkpoint

TOLERANCE = 1e-3
KINDS = ["llama", "llama3_biased"]


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", list(FORMATS))
def test_logits_are_those_of_what_the_codes_mean(
    tiny_model: Any, name: str, tp: int, tmp_path: Path
) -> None:
    kind = KINDS[list(FORMATS).index(name) % 2]
    path = tmp_path / "model"
    shutil.copytree(tiny_model(kind).path, path)
    meant = quantize_checkpoint(path, *FORMATS[name])
    reference = copy.deepcopy(tiny_model(kind).reference)
    reference.load_state_dict(meant, strict=False)
    tokens = random_tokens(40, 3)
    group = LogitRanks(path, tp, torch.float32)
    try:
        (found,) = group.logits([(None, tokens)])
    finally:
        group.close()
    with torch.inference_mode():
        right = reference(torch.tensor([tokens])).logits[0]
        plain = tiny_model(kind).reference(torch.tensor([tokens])).logits[0]
    assert error(found, right) < TOLERANCE
    assert error(found, plain) > 2 * TOLERANCE  # it was quantized


@pytest.mark.parametrize("name", list(FORMATS))
def test_weights_are_the_same_in_whatever_pieces_they_are_read(
    tiny_model: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama").path, path)
    meant = quantize_checkpoint(path, *FORMATS[name])[f"{MODULE}.weight"]
    config, (outputs, inputs) = read_model_config(path), meant.shape
    with Checkpoint(path, config) as checkpoint:
        for num_rows, (rows, columns) in itertools.product(
            (1, 3, outputs), ((Span(0, outputs), Span(0, inputs)), (Span(5, 44), Span(7, 90)))
        ):
            monkeypatch.setattr(weights_checkpoint, "DEQUANTIZED_AT_ONCE", num_rows * inputs)
            found = read_weight(checkpoint, config, MODULE, (outputs, inputs), rows, columns)
            right = meant[rows.start : rows.stop, columns.start : columns.stop]
            assert torch.allclose(found, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe",
        "lfm2",
        pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
        pytest.param("granitemoehybrid_sparse", marks=pytest.mark.slow),  # but its stacks
    ],
)
def test_experts_and_mixers_are_read_as_other_linears(
    tiny_model: Any, kind: str, tp: int, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model(kind).path, path)
    meant = quantize_checkpoint(path, *FORMATS["int8 by channels"])
    plain = tmp_path / "plain"
    shutil.copytree(tiny_model(kind).path, plain)
    for file in plain.glob("*.safetensors*"):
        file.unlink()
    save_file(meant, plain / "model.safetensors")
    tokens, found = random_tokens(40, 3), []
    for each in (path, plain, tiny_model(kind).path):
        group = LogitRanks(each, tp, torch.float32)
        try:
            found += group.logits([(None, tokens)])
        finally:
            group.close()
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["rank 8 on every linear", "dora"])
def test_adapters_are_added_to_what_the_codes_mean(
    tiny_model: Any, kind: str, tmp_path: Path
) -> None:
    path, adapter = tmp_path / "model", tmp_path / "adapter"
    shutil.copytree(tiny_model("llama").path, path)
    reference = copy.deepcopy(tiny_model("llama").reference)
    reference.load_state_dict(quantize_checkpoint(path, *FORMATS["gptq"]), strict=False)
    make_adapter_dir(reference, kind, adapter)
    tokens = random_tokens(40, 3)
    group = LogitRanks(path, 2, torch.float32)
    try:
        group.load(0, read(adapter, group.config))
        (found,) = group.logits([(0, tokens)])
    finally:
        group.close()
    assert error(found, by_peft(reference, adapter, tokens)) < TOLERANCE


@pytest.fixture
def quantized(request: pytest.FixtureRequest, tiny_model: Any, tmp_path: Path) -> Path:
    """A checkpoint of the format that the test names."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama").path, path)
    quantize_checkpoint(path, *FORMATS[request.param])
    return path


MODULE = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("damage", ["missing", "unknown", "cut", "wider", "another type"])
@pytest.mark.parametrize("quantized", list(FORMATS), indirect=True)
def test_damaged_files_are_refused_by_the_name_of_the_tensor(quantized: Path, damage: str) -> None:
    check_checkpoint(quantized, read_model_config(quantized))
    whole = load_file(quantized / "model.safetensors")
    names = [name for name in whole if name.startswith(f"{MODULE}.") and "input_scale" not in name]
    assert len(names) >= 2
    for name in names:
        tensors = dict(whole)
        match damage:
            case "missing":
                del tensors[name]
            case "unknown":
                tensors[f"{name}_more"] = tensors[name].clone()
            case "cut":
                tensors[name] = tensors[name].flatten()[:0].clone()
                if name.endswith("__nf4"):
                    continue  # of any length; looked at when it is read
            case "wider":
                tensors[name] = torch.stack([tensors[name]] * 2)
            case "another type":
                tensors[name] = tensors[name].to(torch.float64)
        save_file(tensors, quantized / "model.safetensors")
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            check_checkpoint(quantized, read_model_config(quantized))


@pytest.mark.parametrize(
    ("quantized", "suffix", "value", "complaint"),
    [
        ("int4 in groups", "weight_shape", [7, 7], r"weight_shape is \[7, 7\], not"),
        ("int4 in order", "weight_g_idx", 99, "weight_g_idx names a group that is not one of"),
        ("gptq", "g_idx", -1, "g_idx names a group that is not one of"),
    ],
    indirect=["quantized"],
)
def test_numbers_that_cannot_be_are_refused_where_they_are_read(
    quantized: Path, suffix: str, value: Any, complaint: str
) -> None:
    tensors = load_file(quantized / "model.safetensors")
    name = f"{MODULE}.{suffix}"
    tensors[name] = torch.tensor(value).expand_as(tensors[name]).to(tensors[name].dtype).clone()
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ValueError, match=f"{MODULE}: {complaint}"):
        LogitRanks(quantized, 1, torch.float32)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("lm_head", ["lm_head"]),
        ("mlp", ["model.layers.0.mlp.down_proj", "model.layers.7.mlp.gate"]),
        ("model.layers.0", ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"]),
        ("layers.0.self_attn.q_proj", ["model.layers.0.self_attn.q_proj"]),
        ("mlp.gate", ["model.layers.7.mlp.gate"]),
        ("model.layers.1", []),
        ("q", []),
    ],
)
def test_modules_stay_as_they_are_by_their_names_or_those_of_their_blocks(
    name: str, kept: list[str]
) -> None:
    quantization = read_quantization({"quant_method": "fp8", "ignored_layers": [name]})
    modules = [
        "lm_head",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.7.mlp.gate",
        "model.layers.11.mlp_gate.q_proj",
    ]
    found = [module for module in modules if not quantization.covers(module)]
    assert found == kept


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "int-quantized"}


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        (7, "quantization_config: Expected `object`"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size 0"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "lm_head": True}, "lm_head true"),
        ({"quant_method": "gptq", "dynamic": {"-:.*mlp": {}}}, "dynamic is not supported"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit false"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_4bit_quant_type 'fp4'"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "bits 8"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point false"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"a block of \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"a block of \[0, 1\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        (COMPRESSED, "0 config_groups"),
        (COMPRESSED | {"config_groups": {"a": GROUP, "b": GROUP}}, "2 config_groups"),
        (
            COMPRESSED | {"config_groups": {"a": GROUP | {"targets": ["re:.*mlp.*"]}}},
            "targets",
        ),
        (
            COMPRESSED | {"config_groups": {"a": GROUP}, "format": "nvfp4-pack-quantized"},
            "format 'nvfp4-pack-quantized'",
        ),
        (
            COMPRESSED | {"config_groups": {"a": GROUP}, "ignore": ["re:(a+)+b"]},
            "the pattern 're:\\(a",
        ),
        (
            COMPRESSED
            | {"config_groups": {"a": GROUP}, "sparsity_config": {"format": "sparse-24"}},
            "sparsity_config",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_its_key(
    tiny_model: Any, written: Any, complaint: str, tmp_path: Path
) -> None:
    config = json.loads((tiny_model("llama").path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": written}))
    with pytest.raises(ValueError, match=complaint):
        read_model_config(tmp_path)
