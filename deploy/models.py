"""Finds the base model on disk: a directory as it is, or a hub id fetched once; and names it."""

import logging
import os
import re
from hashlib import blake2b
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from deploy.config import ConfigError
from deploy.config_errors import one_line, shown

logger = logging.getLogger("topwork")

FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model")
HUB_TIMEOUT = 30.0  # seconds
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ERRORS = (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError)
# What the hub's client raises without the network is its HTTP library's, httpx or a later one.
_AWAY: tuple[type[Exception], ...] = (
    OSError,
    *(one for one in HfHubHTTPError.__mro__ if one.__name__ == "HTTPError"),
)


def find_model(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model.

    Args:
        model: a directory or a hub id.
        revision: of a hub id.

    Raises:
        ConfigError: if there is no such directory and no such model on the hub, or if its files
            cannot be read.
    """
    directory = _directory(model, revision)
    if directory is not None:
        return directory
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(FILES)))
    except _HUB_ERRORS as error:
        raise _not_given(model, revision, error) from error


def commit_of(model: str, revision: str | None) -> str | None:
    """Return the commit that a revision of a hub id stands for now; None for a directory.

    Where the hub does not answer, it is the one that this machine has fetched last.

    Raises:
        ConfigError: as `find_model`; also if nobody can tell.
    """
    if _directory(model, revision) is not None:
        return None
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    try:
        commit = HfApi().model_info(model, revision=revision, timeout=HUB_TIMEOUT).sha
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _not_given(model, revision, error) from error
    except _AWAY as away:
        try:
            fetched = snapshot_download(
                model, revision=revision, local_files_only=True, allow_patterns=["config.json"]
            )
        except _HUB_ERRORS:
            raise _not_given(model, revision, away) from away
        logger.warning("%s: the hub does not answer; taking what was fetched last", shown(model))
        return Path(fetched).name
    if commit is None:
        raise ConfigError(f"model: the hub names no commit of {shown(model)}")
    return commit


def _not_given(model: str, revision: str | None, error: Exception) -> ConfigError:
    where = "" if revision is None else f" at revision {shown(revision)}"
    return ConfigError(
        f"model: {shown(model)}{where} is neither a directory nor a model that the hub gives: "
        f"{one_line(error)}"
    )


def _directory(model: str, revision: str | None) -> Path | None:
    """Return the directory that a model is; None if it is a hub id."""
    try:
        directory = Path(model).expanduser()
        if directory.is_dir():
            _check_directory(directory)
            if revision is not None:
                raise ConfigError("revision: is of a hub id, and the model is a directory")
            return directory.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no home, a name that cannot be one
        raise ConfigError(f"model: cannot look at {shown(model)}: {one_line(error)}") from error
    if directory.is_absolute() or model.startswith("."):
        raise ConfigError(f"model: no such directory: {directory}")
    return None


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
