"""deploy.models: where the base model lies, and what tells one from another."""

from pathlib import Path

import pytest

from deploy.config import ConfigError
from deploy.models import base_digest, find_model


def model_in(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_a_directory_is_the_model(tmp_path: Path) -> None:
    made = model_in(tmp_path / "model")
    assert find_model(str(made)) == made


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no config.json"):
        find_model(str(tmp_path))


def test_a_path_where_nothing_is_is_no_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        find_model(str(tmp_path / "model"))


def test_weights_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    made = model_in(tmp_path / "model")
    (made / "more.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="more.safetensors cannot be read"):
        find_model(str(made))


def test_another_type_or_other_weights_are_another_model(tmp_path: Path) -> None:
    made = model_in(tmp_path / "model")
    first = base_digest(made, "bfloat16")
    assert base_digest(made, "bfloat16") == first != base_digest(made, "float32")
    (made / "model.safetensors").write_bytes(b"Weights")
    assert base_digest(made, "bfloat16") != first
