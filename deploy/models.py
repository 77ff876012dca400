"""Finds the base model: on disk as it is, or by a hub id, fetched once."""

import logging
import re
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
from deploy.local_model import find_local_model

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
    """Return the directory of a model, or its GGUF file.

    Args:
        model: a directory, a GGUF file or a hub id; a directory that holds such a file and nothing
            else of weights stands for it.
        revision: of a hub id.

    Raises:
        ConfigError: if there is no such directory and no such model on the hub, or if its files
            cannot be read.
    """
    found = find_local_model(model, revision)
    if found is not None:
        return found
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(FILES)))
    except _HUB_ERRORS as error:
        raise _not_given(model, revision, error) from error


def commit_of(model: str, revision: str | None) -> str | None:
    """Return the commit that a revision of a hub id stands for now; None for what is on disk.

    Where the hub does not answer, it is the one that this machine has fetched last.

    Raises:
        ConfigError: as `find_model`; also if nobody can tell.
    """
    if find_local_model(model, revision) is not None:
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
