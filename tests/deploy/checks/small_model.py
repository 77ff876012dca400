"""A model directory that can be served, of a few kilobytes, which tests may then spoil."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker.model_config_reader import read_model_config
from worker.weights.tensor_names import expected_tensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

Tensors = dict[str, Any]


def make_model(directory: Path, **config: Any) -> Path:
    """Write config.json, with some keys changed, weights and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    tensors = expected_tensors(read_model_config(directory))
    save_file({n: np.zeros(shape, np.float32) for n, shape in tensors}, directory / WEIGHTS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {char: number for number, char in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def edit_json(file: Path, change: Callable[[Any], object]) -> None:
    """Change what a JSON file holds."""
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_header(file: Path, change: Callable[[Any], object]) -> None:
    """Change the header of a safetensors file, and nothing behind it."""
    header, data = split(file)
    change(header)
    write(file, json.dumps(header).encode(), data)


def split(file: Path) -> tuple[Any, bytes]:
    """Return (header, data) of a safetensors file."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write(file: Path, header: bytes, data: bytes) -> None:
    """Write a safetensors file of any header."""
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def shard(directory: Path) -> None:
    """Lay the weights out as two files with an index."""
    header, data = split(directory / WEIGHTS)
    header.pop("__metadata__", None)
    files: dict[str, Tensors] = {}
    weight_map: dict[str, str] = {}
    for name, entry in header.items():
        file = f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors"
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[begin:end], np.float32).reshape(entry["shape"])
        files.setdefault(file, {})[name] = array
        weight_map[name] = file
    (directory / WEIGHTS).unlink()
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
