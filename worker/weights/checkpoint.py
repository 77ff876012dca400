"""Named tensors in the safetensors files of a model directory, read a slice at a time.

Owns finding the files and checking what they hold against what is asked for: the caller says which
tensors there must be.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.weights.partition import Span

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")


class _Index(msgspec.Struct):
    """The part of a sharded checkpoint's index that matters here."""

    weight_map: dict[str, str]


class Checkpoint:
    """The open files of one model; a context manager."""

    def __init__(self, model_dir: Path) -> None:
        """Open the files.

        Raises:
            FileNotFoundError: if there are none, or one that the index names is missing.
            ValueError: if one is not a readable safetensors file.
        """
        self._stack = ExitStack()
        self._file_by_name: dict[str, Any] = {}
        self._asked: set[str] = set()
        with ExitStack() as stack:
            for path in _files(model_dir):
                file = stack.enter_context(_opened(path))
                for name in file.keys():  # noqa: SIM118, a handle and not a dict
                    if name in self._file_by_name:
                        raise ValueError(f"{path.name}: tensor {name} is in another file as well")
                    self._file_by_name[name] = file
            self._stack = stack.pop_all()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(
        self, name: str, shape: tuple[int, ...], rows: Span, columns: Span | None = None
    ) -> Tensor:
        """Return rows, and columns if given, of a tensor of that whole shape, as stored.

        Raises:
            ValueError: if the tensor is missing or has another shape or an integer type.
        """
        self._asked.add(name)
        file = self._file_by_name.get(name)
        if file is None:
            raise ValueError(f"the checkpoint has no tensor {name}")
        whole = file.get_slice(name)
        if tuple(whole.get_shape()) != shape:
            raise ValueError(f"tensor {name} has shape {whole.get_shape()}, not {list(shape)}")
        if whole.get_dtype() not in _DTYPES:
            raise ValueError(f"tensor {name} is of type {whole.get_dtype()}, not {_DTYPES}")
        # A slice that keeps whole rows is one run of bytes in the file.
        if columns is None or len(columns) == shape[1]:
            part: Tensor = whole[rows.start : rows.stop]
            return part
        part = whole[rows.start : rows.stop, columns.start : columns.stop]
        return part

    def check_all_asked(self, is_ignored: Callable[[str], bool]) -> None:
        """Refuse a checkpoint with tensors that were not read: its model is another one.

        Raises:
            ValueError: with the names of some of them.
        """
        names = sorted(n for n in self._file_by_name if n not in self._asked and not is_ignored(n))
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"the checkpoint has unknown tensors: {', '.join(names[:5])}{more}")


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / _INDEX
    if not index.exists():
        return [model_dir / _SINGLE]
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise ValueError(f"{_INDEX}: {error}") from error
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{_INDEX}: {name} is not the name of a file beside it")
    return [model_dir / name for name in names]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error
