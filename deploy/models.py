"""Finds the base model on disk: a directory as it is, or a hub id fetched once; and names it."""

import os
from hashlib import blake2b
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from deploy.config import ConfigError
from deploy.config_errors import one_line, shown

FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model")


def find_model(model: str) -> Path:
    """Return the directory of a model.

    Raises:
        ConfigError: if there is no such directory and no such model on the hub, or if its files
            cannot be read.
    """
    try:
        directory = Path(model).expanduser()
        if directory.is_dir():
            _check_directory(directory)
            return directory.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no home, a name that cannot be one
        raise ConfigError(f"model: cannot look at {shown(model)}: {one_line(error)}") from error
    if directory.is_absolute() or model.startswith("."):
        raise ConfigError(f"model: no such directory: {directory}")
    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model: {shown(model)} is neither a directory nor a model that the hub gives: "
            f"{one_line(error)}"
        ) from error


def _check_directory(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model: {directory} holds no config.json")
    for file in sorted(directory.glob("*.safetensors")):
        if not file.is_file() or not os.access(file, os.R_OK):
            raise ConfigError(
                f"model: {file} cannot be read by this user, is gone, or is no regular file"
            )


_SAMPLE_BYTES = 2**20  # of each weight file, from its start, its middle and its end


def base_digest(model_dir: Path, dtype: str) -> str:
    """Return what tells one base model from another: the same on every host with the same files.

    Made of config.json and, for each weight file, its name, its size and three samples: to hash
    all of a large model would take minutes at every start. The type that the KV is kept in is part
    of it, because the KV of one type is not that of another.
    """
    digest = blake2b(b"topwork base 1", digest_size=32)
    digest.update(dtype.encode())
    digest.update((model_dir / "config.json").read_bytes())
    for file in sorted(model_dir.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                opened.seek(start)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
