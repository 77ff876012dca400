"""The committed adapters: small, valid, and different in everything a server must get right."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from cluster.adapters.adapter import Adapter
from cluster.adapters.peft.checks import AdapterLimits
from cluster.adapters.peft.reader import read_adapter
from deploy.demo.model import DEFAULT_TARGET
from deploy.demo.recipes import HELD_OUT, QUESTIONS, RECIPES, Recipe
from deploy.demo.train_adapters import ADAPTERS, BASE_MODEL, MAX_BYTES
from worker.model_config_reader import read_model_config

by_name = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def config(recipe: Recipe) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter."""
    text = (ADAPTERS / recipe.name / "adapter_config.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def adapter(recipe: Recipe) -> Adapter:
    """Return an adapter as the server reads it."""
    model = read_model_config(DEFAULT_TARGET)
    return read_adapter(ADAPTERS / recipe.name, model, AdapterLimits(max_lora_rank=64))


def test_every_directory_has_a_recipe_and_every_recipe_a_directory() -> None:
    assert sorted(path.name for path in ADAPTERS.iterdir()) == sorted(
        recipe.name for recipe in RECIPES
    )


@by_name
def test_an_adapter_is_two_small_files_that_tell_nothing_of_who_made_them(recipe: Recipe) -> None:
    files = {path.name: path for path in (ADAPTERS / recipe.name).iterdir()}
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors"]
    assert files["adapter_model.safetensors"].stat().st_size <= MAX_BYTES
    assert config(recipe)["base_model_name_or_path"] == BASE_MODEL
    for path in files.values():
        assert str(Path.home()).encode() not in path.read_bytes()


@by_name
def test_an_adapter_is_what_its_recipe_says(recipe: Recipe) -> None:
    found = config(recipe)
    assert found["r"] == recipe.lora_rank
    assert found["lora_alpha"] == recipe.alpha
    assert found["use_rslora"] == recipe.rslora
    assert found["target_modules"] == sorted(recipe.targets)


def test_the_adapters_differ_in_rank_targets_and_scaling_rule() -> None:
    for left, right in combinations(RECIPES, 2):
        assert left.lora_rank != right.lora_rank
        assert set(left.targets) != set(right.targets)
    assert sum(recipe.rslora for recipe in RECIPES) == 1
    assert any(recipe.alpha != 2 * recipe.lora_rank and not recipe.rslora for recipe in RECIPES)


def test_no_adapter_was_trained_on_what_it_is_asked() -> None:
    assert not set(HELD_OUT) & set(QUESTIONS)


@pytest.mark.model
@by_name
def test_the_server_takes_the_adapter(recipe: Recipe) -> None:
    read = adapter(recipe)
    assert read.dtype == "bfloat16"
    assert read.lora_rank == recipe.lora_rank
    assert sorted(read.module_names) == sorted(recipe.targets)
    divisor = recipe.lora_rank**0.5 if recipe.rslora else recipe.lora_rank
    assert {module.scaling for module in read.modules} == {recipe.alpha / divisor}


@pytest.mark.model
def test_the_adapters_have_different_digests() -> None:
    assert len({adapter(recipe).digest for recipe in RECIPES}) == len(RECIPES)
