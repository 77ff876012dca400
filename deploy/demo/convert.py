"""Turns a GGUF file into a Hugging Face directory; run as `python -m deploy.demo.convert GGUF OUT`.

A process of its own, so that torch and half a gigabyte of weights leave with it.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

CONTEXT_LENGTH = 8192
# Written by the loader for its own use; other readers of the directory trip over them.
LOADER_KEYS = ("backend", "is_local", "local_files_only")


def convert(gguf: Path, out: Path) -> None:
    """Write config, bf16 safetensors, tokenizer and chat template of `gguf` into `out`."""
    folder, file = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=torch.bfloat16,
        # Without it the blocks stay packed and cannot be saved.
        quantization_config=GgufConfig(gguf_file=file, dequantize=True),
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)
    _tidy_tokenizer_config(out / "tokenizer_config.json")
    share_weights(out)


def share_weights(directory: Path) -> None:
    """Let who may read config.json read the weights, which are written for their owner alone."""
    mode = (directory / "config.json").stat().st_mode
    (directory / "model.safetensors").chmod(mode)


def _tidy_tokenizer_config(path: Path) -> None:
    """Name a tokenizer class that every release of transformers knows, and the real context."""
    config = json.loads(path.read_text())
    for key in LOADER_KEYS:
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_max_length"] = CONTEXT_LENGTH
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
