"""Finds a base model that is on this machine, and tells one from another.

It is a directory as the hub has it, or a GGUF file.
"""

import os
from hashlib import blake2b
from pathlib import Path

from deploy.config_errors import ConfigError, one_line, shown
from worker.model_files import CONFIG, read_file
from worker.weights.gguf.files import gguf_files, is_gguf, is_later_part

_SAMPLE_BYTES = 2**20  # of each weight file, from its start, its middle and its end


def find_local_model(model: str, revision: str | None = None) -> Path | None:
    """Return the directory or the GGUF file that a model is; None if it is a hub id.

    Raises:
        ConfigError: if a revision is given, or the files cannot be read.
    """
    try:
        path = Path(model).expanduser()
        found = _in_directory(path) if path.is_dir() else path
        if path.is_dir() or is_gguf(path):
            if revision is not None:
                raise ConfigError("revision: is of a hub id, and the model is a directory or file")
            _check_files(found)
            # Of a file the name counts, and a hub cache has links to files of other names.
            return found.parent.resolve() / found.name if is_gguf(found) else found.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no home, a name that cannot be one
        raise ConfigError(f"model: cannot look at {shown(model)}: {one_line(error)}") from error
    if path.is_absolute() or model.startswith("."):
        raise ConfigError(f"model: no such directory, and no GGUF file: {path}")
    return None


def _in_directory(directory: Path) -> Path:
    """Return the GGUF file that a directory stands for, or the directory."""
    if any(directory.glob("*.safetensors")):
        return directory
    names = sorted(path.name for path in directory.iterdir() if is_gguf(path))
    firsts = [name for name in names if not is_later_part(name)]
    if len(firsts) > 1:
        listed = ", ".join(map(shown, firsts[:3])) + (" and more" if len(firsts) > 3 else "")
        raise ConfigError(f"model: {directory} holds several GGUF files, name one: {listed}")
    return directory / firsts[0] if firsts else directory


def _check_files(model: Path) -> None:
    if is_gguf(model):
        files = gguf_files(model)
    elif not (model / CONFIG).is_file():
        raise ConfigError(f"model: {model} holds no {CONFIG} and no GGUF file")
    else:
        files = tuple(sorted(model.glob("*.safetensors")))
    for file in files:
        if not file.is_file() or not os.access(file, os.R_OK):
            raise ConfigError(
                f"model: {file} cannot be read by this user, is gone, or is no regular file"
            )


def base_digest(
    model_dir: Path,
    dtype: str,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    lora_dtype: str = "auto",
) -> str:
    """Return what tells one base model from another: the same on every host with the same files.

    Made of config.json, of a GGUF file as its metadata says it, and, for each weight file, its
    name, its size and three samples: to hash all of a large model would take minutes at every
    start. The type that the KV is kept in is part of it, because the KV of one type is not that of
    another, and so is what computes it, an adapter's LoRA too.
    """
    digest = blake2b(b"topwork base 1", digest_size=32)
    kv = None if kv_cache_dtype == "auto" else f"KV in {kv_cache_dtype}"
    lora = None if lora_dtype == "auto" else f"LoRA in {lora_dtype}"
    digest.update(" ".join(filter(None, (dtype, quantization, kv, lora))).encode())
    digest.update(read_file(model_dir, CONFIG))
    of_gguf = is_gguf(model_dir)
    files = gguf_files(model_dir) if of_gguf else sorted(model_dir.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                opened.seek(start)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
