"""Whether the headers of a checkpoint are those of its model, and its index that of its files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.worker.classifiers import save_classifier
from worker.model_config_reader import read_model_config
from worker.weights.checkpoint_files import check_checkpoint, weight_files
from worker.weights.safetensors_header import read_header
from worker.weights.tensor_names import expected_tensors

INDEX = "model.safetensors.index.json"
KINDS = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss"]


def check(path):
    check_checkpoint(path, read_model_config(path))


@pytest.fixture
def sharded(tiny_model, tmp_path):
    """Return a copy of a model whose weights are in several files."""
    return Path(shutil.copytree(tiny_model("mistral").path, tmp_path / "model"))


def edit_index(path, change):
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_that_are_expected_are_those_that_transformers_saves(tiny_model, kind):
    path = tiny_model(kind).path
    saved = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118
                saved[name] = tuple(opened.get_slice(name).get_shape())
    assert dict(expected_tensors(read_model_config(path))) == saved
    check(path)


def test_every_file_that_the_index_names_must_be_there(sharded):
    first, *_, last = weight_files(sharded)
    last.unlink()
    with pytest.raises(FileNotFoundError, match=f"not there: {last.name}"):
        check(sharded)
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"not there: {first.name}, {last.name}"):
        check(sharded)


def test_a_damaged_file_is_named_whichever_it_is(sharded):
    file = weight_files(sharded)[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file.name}: it is truncated"):
        check(sharded)


def test_an_index_of_other_files_is_refused(sharded):
    first, second = weight_files(sharded)[:2]
    name = next(iter(read_header(first)))
    edit_index(sharded, lambda names: names.update({name: second.name}))
    with pytest.raises(
        ValueError, match=f"{name} is said to be in {second.name}; it is in {first.name}"
    ):
        check(sharded)
    edit_index(sharded, lambda names: names.update({name: first.name, "x": first.name}))
    with pytest.raises(ValueError, match="tensor x .*; it is in none of the files"):
        check(sharded)


def test_what_an_index_does_not_tell_is_found_in_the_files(sharded):
    edit_index(sharded, lambda names: names.pop("model.norm.weight"))
    check(sharded)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "its weight_map is empty"),
        ('{"weight_map": {"a": 1}}', "Expected `str`"),
        ('{"weight_map": ' + "[" * 100_000, "weight_map"),
        ('{"x": ' + "[" * 100_000, "recursion"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not the name of a file beside it"),
    ],
)
def test_an_index_that_cannot_be_one_is_refused(sharded, text, fault):
    (sharded / INDEX).write_text(text)
    with pytest.raises(ValueError, match=rf"{INDEX}: .*{fault}"):
        check(sharded)


def test_a_tensor_that_is_there_twice_is_refused(sharded):
    files = weight_files(sharded)
    shutil.copy(files[0], files[1])
    with pytest.raises(ValueError, match="is both in .*00001.* and in .*00002"):
        check(sharded)


def test_without_weights_it_is_told_what_else_there_is(sharded):
    for file in (*weight_files(sharded), sharded / INDEX):
        file.unlink()
    (sharded / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors.*pytorch_model.bin cannot"):
        check(sharded)


def test_a_model_of_any_number_of_layers_is_compared_at_once(tiny_model):
    path = tiny_model("llama").path
    config = replace(read_model_config(path), num_layers=2**31 - 1)
    with pytest.raises(
        ValueError, match=r"no tensor model\.layers\.2\.[^,]*, [^,]*, [^,]* and more"
    ):
        check_checkpoint(path, config)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_model_that_classifies_has_a_score_in_place_of_lm_head(tiny_model, tmp_path, kind):
    save_classifier(tiny_model(kind).reference, tmp_path, 3)
    check(tmp_path)
    expected = dict(expected_tensors(read_model_config(tmp_path)))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert "score.weight" in expected and "lm_head.weight" not in expected
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    check(tmp_path)  # transformers does not look at it either
    save_file({**tensors, "score.weight": torch.ones(2, 3)}, file)
    with pytest.raises(ValueError, match=r"tensor score\.weight has shape \[2, 3\], not \[3, "):
        check(tmp_path)
    del tensors["score.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"the checkpoint has no tensor score\.weight"):
        check(tmp_path)
