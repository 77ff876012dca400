"""The files of a checkpoint, and whether what their headers say is the model of its `config.json`.

Reads headers only and needs no torch, so that a server and `topwork check` can look at the weights
of any size before anything is started.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import msgspec

from worker.model_config import ModelConfig
from worker.quantization.formats import fits
from worker.regular_file import read_bounded
from worker.weights.gguf.files import is_gguf, open_gguf
from worker.weights.gguf.tensors import check_tensors
from worker.weights.safetensors_header import TensorHeader, read_header, shown
from worker.weights.tensor_names import (
    as_stored,
    code_dtypes,
    expected_tensors,
    is_ignored,
    standard_name,
    stored_dtypes,
)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 2**26
_LISTED = 3  # tensors that a message names
_OTHERS = ("pytorch_model*.bin", "*.pth", "consolidated*.safetensors")


class _Index(msgspec.Struct):
    """The part of a sharded checkpoint's index that matters here."""

    weight_map: dict[str, str]


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """Return the files of a checkpoint, those that its index names if there is one.

    Raises:
        FileNotFoundError: if there are none, or one that the index names is missing.
        OSError: if the index cannot be read.
        ValueError: if the index cannot be understood.
    """
    names = sorted(set(_weight_map(model_dir).values())) or [_SINGLE]
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{_INDEX}: {shown(name)} is not the name of a file beside it")
    missing = [name for name in names if not (model_dir / name).exists()]
    if missing == [_SINGLE]:
        raise FileNotFoundError(f"{model_dir} holds no {_SINGLE} and no {_INDEX}{_met(model_dir)}")
    if missing:
        raise FileNotFoundError(f"{_INDEX} names files that are not there: {_listed(missing)}")
    return tuple(model_dir / name for name in names)


def check_checkpoint(model_dir: Path, config: ModelConfig) -> None:
    """Refuse a checkpoint that is not whole, or not that of the model.

    Raises:
        OSError: if a file is missing or cannot be read.
        ValueError: naming the file or the tensors at fault.
    """
    if is_gguf(model_dir):
        check_tensors(open_gguf(model_dir), config)
        return
    found: dict[str, tuple[str, TensorHeader]] = {}
    for path in weight_files(model_dir):
        for written, header in read_header(path).items():
            name = standard_name(written, config)
            if name is None:
                continue
            if name in found:
                first = found[name][0]
                raise ValueError(f"tensor {shown(name)} is both in {first} and in {path.name}")
            found[name] = path.name, header
    _check_tensors({name: header for name, (_, header) in found.items()}, config)
    _check_index(model_dir, {name: file for name, (file, _) in found.items()}, config)


def _check_tensors(found: dict[str, TensorHeader], config: ModelConfig) -> None:
    """Refuse a checkpoint if any tensor is missing, unknown, or not what it must be."""
    config = as_stored(config, found)
    # A config.json may claim as many layers as it likes: one by one, until some are missing.
    missing = [*islice((n for n, _ in expected_tensors(config) if n not in found), _LISTED + 1)]
    if missing:
        more = " and more" if len(missing) > _LISTED else ""
        raise ValueError(f"the checkpoint has no tensor {', '.join(missing[:_LISTED])}{more}")
    used, codes = dict(expected_tensors(config)), code_dtypes(config)
    for name, shape in used.items():
        header = found[name]
        if not fits(header.shape, shape):
            raise ValueError(f"tensor {name} has shape {list(header.shape)}, not {list(shape)}")
        dtypes = codes.get(name) or stored_dtypes(name)
        if header.dtype not in dtypes:
            raise ValueError(
                f"tensor {name} is of type {header.dtype}, not one of {', '.join(dtypes)}"
            )
    unknown = sorted(name for name in found if name not in used and not is_ignored(name, config))
    if unknown:
        raise ValueError(f"the checkpoint has unknown tensors: {_listed(unknown)}")


def _check_index(model_dir: Path, files: dict[str, str], config: ModelConfig) -> None:
    """Refuse an index that is that of other files."""
    for written, file in _weight_map(model_dir).items():
        name = standard_name(written, config)
        if name is not None and files.get(name) != file and not is_ignored(name, config):
            real = f"it is in {files[name]}" if name in files else "it is in none of the files"
            raise ValueError(f"{_INDEX}: tensor {shown(name)} is said to be in {file}; {real}")


def _weight_map(model_dir: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; empty if there is no index."""
    path = model_dir / _INDEX
    if not path.exists():
        return {}
    try:
        read = msgspec.json.decode(read_bounded(path, _MAX_INDEX_BYTES), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{_INDEX}: {error}") from error
    if not read:
        raise ValueError(f"{_INDEX}: its weight_map is empty")
    return read


def _met(model_dir: Path) -> str:
    """Return what else of weights a directory holds, as the end of a message."""
    others = sorted(path.name for pattern in _OTHERS for path in model_dir.glob(pattern))
    return f"; {_listed(others)} cannot be read: convert to safetensors" if others else ""


def _listed(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _LISTED
    text = ", ".join(shown(name) for name in all_names[:_LISTED])
    return f"{text} and {more} more" if more > 0 else text
