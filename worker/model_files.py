"""The JSON files of a model, by their Hugging Face names, whatever the model lies in.

A model is a directory as the hub has it, or a GGUF file, of which the same is said by its metadata.
Beside a GGUF file may lie the files of its tokenizer and `generation_config.json`, which are then
taken; its shape is told by the file alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.regular_file import read_bounded
from worker.weights.gguf.config import config_document, generation_document
from worker.weights.gguf.files import Gguf, is_gguf, open_gguf
from worker.weights.gguf.tokenizer import tokenizer_config_document, tokenizer_document

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE)

MAX_BYTES = 2**28  # of a file, unless a caller wants less

_OF_METADATA: dict[str, Callable[[Gguf], dict[str, Any]]] = {
    CONFIG: config_document,
    GENERATION: generation_document,
    TOKENIZER: tokenizer_document,
    TOKENIZER_CONFIG: tokenizer_config_document,
}


def folder_of(model: Path) -> Path:
    """Return the directory that a model is, or that its file is in."""
    return model.parent if is_gguf(model) else model


def has_file(model: Path, name: str) -> bool:
    """Tell whether a model has a file of that name, or says the same in its own."""
    return (folder_of(model) / name).exists() or (is_gguf(model) and name in _OF_METADATA)


def read_file(model: Path, name: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return what a file of a model holds, or what would stand in it.

    Args:
        model: a directory, or a GGUF file.
        name: such as `config.json`.
        max_bytes: that a file may take.

    Raises:
        OSError: if there is none, or it cannot be read.
        ValueError: if it is too large, or metadata cannot be said so; names what is at fault.
    """
    beside = folder_of(model) / name
    if is_gguf(model) and name in _OF_METADATA and (name == CONFIG or not beside.exists()):
        return json.dumps(_OF_METADATA[name](open_gguf(model))).encode()
    return read_bounded(beside, max_bytes)
