"""Defaults of sampling: where they come from, and what is a mistake in them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cluster.router.config import SamplingDefaults
from deploy.config import ConfigError, ServeConfig, load_config
from deploy.generation_config import sampling_defaults, shown_defaults
from tests.end_to_end.server import MODEL_DIR
from worker.model_files import GENERATION

QWEN = {
    "do_sample": True,
    "eos_token_id": [1, 2],
    "max_new_tokens": 2048,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.37.0",
}
OF_QWEN = SamplingDefaults(
    temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, max_tokens=2048
)


def write(directory: Path, content: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / GENERATION).write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return directory


def defaults(model_dir: Path, **keys: Any) -> SamplingDefaults:
    return sampling_defaults(ServeConfig(model="m", **keys), model_dir)


def test_the_models_own_defaults_are_in_force(tmp_path: Path) -> None:
    assert defaults(write(tmp_path, QWEN)) == OF_QWEN


def test_vllm_means_openais_defaults(tmp_path: Path) -> None:
    assert defaults(write(tmp_path, QWEN), generation_config="vllm") == SamplingDefaults()


def test_a_model_without_such_a_file_has_openais(tmp_path: Path) -> None:
    assert defaults(tmp_path) == SamplingDefaults()


def test_they_may_come_from_elsewhere(tmp_path: Path) -> None:
    other = write(tmp_path / "other", QWEN)
    for path in (other, other / GENERATION):
        assert defaults(tmp_path, generation_config=str(path)) == OF_QWEN


def test_an_override_goes_before_the_file(tmp_path: Path) -> None:
    found = defaults(write(tmp_path, QWEN), override_generation_config={"top_k": -1, "min_p": 0.1})
    assert (found.top_k, found.min_p, found.temperature) == (0, 0.1, 0.7)


def test_null_says_nothing(tmp_path: Path) -> None:
    assert defaults(write(tmp_path, {"temperature": None})) == SamplingDefaults()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"temperature": 7}, "temperature 7 will not do: Input should be less than or equal to 2"),
        ({"temperature": "0.7"}, "temperature '0.7' will not do"),
        ({"top_k": 2.5}, "top_k 2.5 will not do"),
        ({"top_p": True}, "top_p True will not do"),
        ({"repetition_penalty": 0}, "repetition_penalty 0 will not do"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 will not do"),
        ('{"temperature": NaN}', "temperature nan will not do"),
        ("[1]", "should be"),
        ("not json", "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON"),
    ],
)
def test_nonsense_is_refused_with_the_key(tmp_path: Path, content: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match="generation_config") as raised:
        defaults(write(tmp_path, content))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="generation_config: .*nowhere"):
        defaults(tmp_path, generation_config=str(tmp_path / "nowhere"))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / GENERATION)
    with pytest.raises(ConfigError, match="not a regular file"):
        defaults(tmp_path)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ({"temprature": 1}, "temprature is not one of temperature, top_p"),
        ({"top_p": 0}, "top_p 0 will not do"),
    ],
)
def test_a_mistaken_override_is_refused(
    tmp_path: Path, override: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        defaults(tmp_path, override_generation_config=override)
    assert reason in str(raised.value)


def test_a_flag_gives_the_override_as_json() -> None:
    flags = {"model": "m", "override_generation_config": '{"temperature": 0.5}'}
    assert load_config(None, flags).override_generation_config == {"temperature": 0.5}
    for wrong in ("{", "[1]", "temperature=0.5"):
        with pytest.raises(ConfigError, match="override_generation_config"):
            load_config(None, {"model": "m", "override_generation_config": wrong})


def test_the_defaults_are_told_in_one_line() -> None:
    assert shown_defaults(OF_QWEN) == (
        "unless requests say otherwise: temperature 0.7, top_p 0.8, top_k 20, min_p 0, "
        "repetition_penalty 1.05, max_tokens 2048"
    )


@pytest.mark.model
def test_the_demo_model_changes_no_default() -> None:
    assert defaults(MODEL_DIR) == SamplingDefaults()
