"""Reading slices of checkpoints, whole ones and broken ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from worker.model_config_reader import read_model_config
from worker.spans import Span
from worker.weights.checkpoint import Checkpoint
from worker.weights.loader import load_weights
from worker.weights.partition import partition

LLAMA_TENSOR = "model.layers.1.mlp.down_proj.weight"


def load(path, tp=1, rank=0, dtype=torch.float32):
    config = read_model_config(path)
    return load_weights(path, config, partition(config, tp, rank), dtype, torch.device("cpu"))


@pytest.fixture
def editable(tiny_model, tmp_path):
    """Return a function that changes the tensors of a copy of a tiny model."""

    def edit(change, kind="llama"):
        path = tmp_path / "model"
        shutil.copytree(tiny_model(kind).path, path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        return path

    return edit


def test_slices_of_all_ranks_together_are_the_whole(tiny_model):
    model = tiny_model("mistral")
    weight = model.reference.model.embed_tokens.weight
    parts = [load(model.path, tp=4, rank=rank).embedding for rank in range(4)]
    assert torch.equal(torch.cat(parts), weight)
    assert sum(part.shape[0] for part in parts) == 131


def test_a_slice_is_read_from_a_sharded_checkpoint(tiny_model):
    model = tiny_model("mistral")
    assert len(list(model.path.glob("*.safetensors"))) > 1
    with Checkpoint(model.path, read_model_config(model.path)) as checkpoint:
        found = checkpoint.read(LLAMA_TENSOR, (64, 90), Span(3, 9), Span(10, 31))
    weight = model.reference.model.layers[1].mlp.down_proj.weight
    assert torch.equal(found, weight[3:9, 10:31])


def test_weights_are_converted_to_the_dtype_of_the_run(editable):
    path = editable(lambda t: t.update({k: v.half() for k, v in t.items()}))
    assert load(path, dtype=torch.bfloat16).embedding.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_no_file_stays_mapped_once_its_weights_are_loaded(tiny_model, kind):
    path = tiny_model(kind).path
    weights = load(path)
    mapped = Path("/proc/self/maps").read_text()
    assert not [line for line in mapped.splitlines() if str(path) in line]
    assert weights.embedding.shape[1] == read_model_config(path).hidden_size


def test_half_the_bits_are_half_the_bytes(tiny_model):
    """But for what the packed layout adds, which is much for a model so small."""
    path = tiny_model("qwen2").path
    wide, narrow = load(path), load(path, dtype=torch.bfloat16)
    assert narrow.num_bytes < wide.num_bytes
    assert narrow.embedding.nbytes * 2 == wide.embedding.nbytes


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop(LLAMA_TENSOR), f"no tensor {LLAMA_TENSOR}"),
        (lambda t: t.update({LLAMA_TENSOR: t[LLAMA_TENSOR][:, 1:].clone()}), r"shape \[72, 99\]"),
        (lambda t: t.update({LLAMA_TENSOR: t[LLAMA_TENSOR].to(torch.int8)}), "type I8"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(100)}), "up_proj.bias"),
        (lambda t: t.update({"model.layers.2.x": torch.ones(1)}), "unknown.*layers.2.x"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(editable, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        load(editable(change))


def test_constants_and_a_tied_head_may_lie_in_a_checkpoint(editable):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": torch.ones(131, 72),
    }
    load(editable(lambda tensors: tensors.update(extra)))


def test_a_truncated_file_is_refused(editable):
    path = editable(lambda tensors: None)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(path)


def test_a_missing_file_of_a_sharded_checkpoint_is_refused(tiny_model, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny_model("mistral").path, path)
    sorted(path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(FileNotFoundError):
        load(path)


def test_an_index_cannot_point_outside_its_directory(tiny_model, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama").path, path)
    index = {"weight_map": {"a": "../model/model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not the name of a file beside it"):
        load(path)
