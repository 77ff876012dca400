"""What can be wrong with the files of a model: how each is done, and what must be said of it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.deploy.checks.small_model import (
    INDEX,
    WEIGHTS,
    edit_header,
    edit_json,
    shard,
    split,
    write,
)

NORM = "model.norm.weight"
SECOND_FILE = "model-00002-of-00002.safetensors"

Spoil = Callable[[Path], object]


def config_of(**changes: object) -> Spoil:
    return lambda model: edit_json(model / "config.json", lambda read: read.update(changes))


def tokenizer_of(change: Callable[[Any], object]) -> Spoil:
    return lambda model: edit_json(model / "tokenizer.json", change)


def header_of(name: str, **changes: object) -> Spoil:
    return lambda model: edit_header(model / WEIGHTS, lambda read: read[name].update(changes))


def content(name: str, data: str) -> Spoil:
    return lambda model: (model / name).write_text(data)


def without(name: str) -> Spoil:
    return lambda model: (model / name).unlink()


def cut(model: Path) -> None:
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:-1])


def misspelt(model: Path) -> None:
    header, data = split(model / WEIGHTS)
    header["model.norm.weigth"] = header.pop(NORM)
    write(model / WEIGHTS, json.dumps(header).encode(), data)


def without_second_file(model: Path) -> None:
    shard(model)
    (model / SECOND_FILE).unlink()


def with_wrong_index(model: Path) -> None:
    shard(model)
    edit_json(model / INDEX, lambda read: read["weight_map"].update({NORM: SECOND_FILE}))


def as_pipe(model: Path) -> None:
    (model / WEIGHTS).unlink()
    os.mkfifo(model / WEIGHTS)


_UNKNOWN_TOKEN = {  # on which the library panics
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<no>", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}

BY_HEADERS: dict[str, tuple[Spoil, str]] = {  # found before anything else is looked at
    "no config.json": (without("config.json"), "holds no config.json"),
    "config.json is cut": (content("config.json", "{"), "config.json: Input data was truncated"),
    "another kind": (config_of(architectures=["Bert"]), "model: architectures: Bert is not"),
    "too many layers": (config_of(num_hidden_layers=3), "no tensor model.layers.2.input_layernorm"),
    "countless layers": (config_of(num_hidden_layers=10**18), "num_hidden_layers is over"),
    "too few layers": (config_of(num_hidden_layers=1), "unknown tensors: model.layers.1.input"),
    "another size": (config_of(hidden_size=24, head_dim=4), "has shape [300, 16], not [300, 24]"),
    "no weights": (without(WEIGHTS), "holds no model.safetensors and no"),
    "weights are empty": (content(WEIGHTS, ""), "model.safetensors is truncated: its 0 bytes"),
    "weights are a pointer": (
        content(WEIGHTS, "version https://git-lfs.github.com/spec/v1"),
        "model.safetensors is no safetensors file",
    ),
    "weights are a pipe": (as_pipe, "is no regular file"),
    "weights are cut": (cut, "model.safetensors: it is truncated: tensor"),
    "a tensor is missing": (misspelt, f"no tensor {NORM}"),
    "a wrong shape": (header_of(NORM, shape=[4, 4]), "norm.weight has shape [4, 4], not [16]"),
    "a wrong type": (header_of(NORM, dtype="I32"), "is of type I32, not one of BF16, F16, F32"),
    "overlap": (header_of(NORM, data_offsets=[0, 64]), "tensor"),
    "offsets out of the file": (header_of(NORM, data_offsets=[2**40, 2**40 + 64]), "tensor"),
    "a file is missing": (without_second_file, f"not there: {SECOND_FILE}"),
    "an index of other files": (with_wrong_index, f"tensor {NORM} is said to be in {SECOND_FILE}"),
}

BY_TOKENIZER: dict[str, tuple[Spoil, str]] = {
    "no tokenizer": (without("tokenizer.json"), "has no tokenizer.json"),
    "tokenizer is cut": (content("tokenizer.json", "{"), "tokenizer.json cannot be read: EOF"),
    "another tokenizer": (content("tokenizer.json", '{"model": 1}'), "tokenizer.json cannot be"),
    "deep tokenizer": (content("tokenizer.json", "[" * 10**6), "tokenizer.json cannot be read"),
    "tokenizer settings are cut": (
        content("tokenizer_config.json", "{"),
        "tokenizer_config.json cannot be loaded: JSONDecodeError",
    ),
    "deep tokenizer settings": (
        content("tokenizer_config.json", '{"x":' + "[" * 10**6),
        "tokenizer_config.json cannot be loaded: RecursionError",
    ),
    "tokens beyond the embedding": (
        tokenizer_of(lambda read: read["model"]["vocab"].update(more=300)),
        "token ids up to 300, and the model's embedding only 300 rows (vocab_size); too many are "
        "'more'",
    ),
    "special tokens beyond the embedding": (
        content(
            "tokenizer_config.json",
            json.dumps({"extra_special_tokens": [f"<{number}>" for number in range(50)]}),
        ),
        "the model's embedding only 300 rows (vocab_size)",
    ),
    "the library panics": (
        tokenizer_of(lambda read: read.update(post_processor=_UNKNOWN_TOKEN)),
        "tokenizer: the process that loads it has ended: exit code 1, pyo3_runtime.PanicException",
    ),
    "a template that is cut": (
        content("chat_template.jinja", "{% for m in messages %}"),
        "the chat template does not compile: line 1: Unexpected end of template",
    ),
    "a filter that there is not": (
        content("chat_template.jinja", "{{ messages | no_such_filter }}"),
        "the chat template does not compile: line 1: No filter named 'no_such_filter'",
    ),
}
