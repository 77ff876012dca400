"""Named tensors in the files of a model, read a slice at a time."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.model_config import ModelConfig
from worker.quantization.dequantize import dequantize
from worker.quantization.formats import Stored, fits
from worker.spans import Span
from worker.weights.checkpoint_files import weight_files
from worker.weights.gguf.checkpoint import GgufCheckpoint
from worker.weights.gguf.files import is_gguf
from worker.weights.tensor_names import standard_name, stored_dtypes

DEQUANTIZED_AT_ONCE = 2**22  # weights: on the way one takes some 20 bytes


class Checkpoint:
    """The open safetensors files of one model; a context manager."""

    def __init__(self, model_dir: Path, config: ModelConfig) -> None:
        """Open the files of a model of that shape.

        Raises:
            FileNotFoundError: if there are none, or one that the index names is missing.
            ValueError: if one is not a readable safetensors file.
        """
        self._stack = ExitStack()
        self._places: dict[str, tuple[Any, str]] = {}  # a file, and what it calls the tensor
        with ExitStack() as stack:
            for path in weight_files(model_dir):
                file = stack.enter_context(_opened(path))
                for written in file.keys():  # noqa: SIM118, a handle and not a dict
                    name = standard_name(written, config)
                    if name is None:
                        continue
                    if name in self._places:
                        raise ValueError(f"{path.name}: tensor {name} is in another file as well")
                    self._places[name] = file, written
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

    @property
    def names(self) -> Collection[str]:
        """What its tensors are called here."""
        return self._places.keys()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Span,
        *others: Span,
        dtypes: Sequence[str] | None = None,
    ) -> Tensor:
        """Return rows, columns and so on of a tensor of that whole shape, as stored.

        They are a copy: a tensor that stays would keep its whole file mapped, which then counts as
        memory of the process for good.

        Args:
            name: of the tensor.
            shape: that it must have.
            rows: of its first axis.
            others: of those behind; of axes that are left out, all.
            dtypes: that it may be stored in; None: as `stored_dtypes` has them.

        Raises:
            ValueError: if the tensor is missing or has another shape or type than it must.
        """
        place = self._places.get(name)
        if place is None:
            raise ValueError(f"the checkpoint has no tensor {name}")
        file, written = place
        whole = file.get_slice(written)
        if not fits(tuple(whole.get_shape()), shape):
            raise ValueError(f"tensor {name} has shape {whole.get_shape()}, not {list(shape)}")
        dtypes = dtypes or stored_dtypes(name)
        if whole.get_dtype() not in dtypes:
            raise ValueError(f"tensor {name} is of type {whole.get_dtype()}, not {dtypes}")
        if shape == (1,):
            scalar: Tensor = file.get_tensor(written)
            return scalar.view(1).clone()
        spans = [rows, *others]
        # A slice that keeps whole rows is one run of bytes in the file.
        while len(spans) > 1 and len(spans[-1]) == shape[len(spans) - 1]:
            spans.pop()
        part: Tensor = whole[tuple(slice(span.start, span.stop) for span in spans)]
        return part.clone()


AnyCheckpoint = Checkpoint | GgufCheckpoint


def open_checkpoint(model: Path, config: ModelConfig, dtype: torch.dtype) -> AnyCheckpoint:
    """Open the files of a model, a directory or a GGUF file.

    Args:
        model: where it lies.
        config: of the model.
        dtype: what becomes of a GGUF file's codes.

    Raises:
        OSError: if one is missing or cannot be read.
        ValueError: if one is damaged.
    """
    if is_gguf(model):
        return GgufCheckpoint(model, config, dtype)
    return Checkpoint(model, config)


def read_weight(
    checkpoint: AnyCheckpoint,
    config: ModelConfig,
    name: str,
    shape: tuple[int, int],
    rows: Span,
    columns: Span,
) -> Tensor:
    """Return rows and columns of the weight of a linear module: as stored, or what codes mean.

    Args:
        checkpoint: that of the model.
        config: of the model.
        name: of the module.
        shape: of the whole weight.
        rows: of the part.
        columns: likewise.

    Raises:
        ValueError: if one of its tensors is not what it must be.
    """
    weight_format = None if config.quantization is None else config.quantization.of(name)
    if weight_format is None:
        return checkpoint.read(f"{name}.weight", shape, rows, columns)

    def read(tensor: Stored, *spans: Span) -> Tensor:
        stored = f"{name}.{tensor.suffix}"
        return checkpoint.read(stored, tensor.shape, *spans, dtypes=tensor.dtypes)

    weight = torch.empty(len(rows), len(columns))
    step = max(1, DEQUANTIZED_AT_ONCE // shape[1])
    try:
        for first in range(rows.start, rows.stop, step):
            some = Span(first, min(first + step, rows.stop))
            place = slice(some.start - rows.start, some.stop - rows.start)
            weight[place] = dequantize(weight_format, read, shape, some, columns)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return weight


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error
