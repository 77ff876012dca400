"""Finds the base model on disk: a directory as it is, the demo model, or a hub id fetched once."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from deploy.config import ConfigError

FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model")


def find_model(model: str) -> Path:
    """Return the directory of a model.

    Raises:
        ConfigError: if there is no such directory and no such model on the hub.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"model: {directory} holds no config.json")
        return directory.resolve()
    if directory.is_absolute() or model.startswith("."):
        raise ConfigError(f"model: no such directory: {directory}")
    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"model: {model!r} is neither a directory nor a model that the hub gives: {error}"
        ) from error
