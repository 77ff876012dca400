"""Turns a GGUF file into a Hugging Face directory; run as `python -m deploy.demo.convert GGUF OUT`.

A process of its own, so that torch and half a gigabyte of weights leave with it.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from worker.model_files import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, read_file


def convert(gguf: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config, safetensors, tokenizer and chat template of `gguf` into `out`."""
    folder, file = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=dtype,
        # Without it the blocks stay packed and cannot be saved.
        quantization_config=GgufConfig(gguf_file=file, dequantize=True),
    )
    model.save_pretrained(out)
    # What transformers makes of the file's tokenizer has digits in words together, which the
    # model's own has not: numbers behind several spaces would be other tokens.
    (out / TOKENIZER).write_bytes(read_file(gguf, TOKENIZER))
    config = json.loads(read_file(gguf, TOKENIZER_CONFIG))
    (out / CHAT_TEMPLATE).write_text(config.pop("chat_template"))
    (out / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    share_weights(out)


def share_weights(directory: Path) -> None:
    """Let who may read config.json read the weights, which are written for their owner alone."""
    mode = (directory / "config.json").stat().st_mode
    (directory / "model.safetensors").chmod(mode)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
