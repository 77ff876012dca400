"""The tensors of a GGUF file by the names of its family, read a slice at a time.

Codes become floats here, a few rows at a time, so that no more is made on the way than what is
asked for. What llama.cpp's converter did to a tensor is undone by reading other rows of it, or by
taking off what was added.

Shapes: R rows and C columns that are read, N rows and K columns of a whole tensor.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from worker.model_config import ModelConfig
from worker.spans import Span
from worker.weights.gguf.blocks import dequantize, plain
from worker.weights.gguf.container import Shape
from worker.weights.gguf.files import open_gguf
from worker.weights.gguf.tensors import Stored, TensorIndex

WIDENED_AT_ONCE = 2**21  # weights: on the way one takes some 20 bytes

_Bytes = np.memmap[tuple[int], np.dtype[np.uint8]]


class GgufCheckpoint:
    """The mapped files of one model; a context manager."""

    def __init__(self, model: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        """Map the files of a model of that shape; codes are read as numbers of a type.

        Raises:
            OSError: if one is missing or cannot be read.
            ValueError: if one is damaged; names it.
        """
        gguf = open_gguf(model)
        self._index = TensorIndex(gguf)
        self._config = config
        self._dtype = dtype
        paths = dict.fromkeys(place.file for place in gguf.tensors.values())
        self._files: dict[Path, _Bytes] = {
            path: np.memmap(path, np.uint8, mode="r") for path in paths
        }

    def __enter__(self) -> "GgufCheckpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()

    @property
    def names(self) -> Collection[str]:
        """Those of stacks of experts: none, for an expert's tensors are found by its own names."""
        return ()

    def read(
        self,
        name: str,
        shape: Shape,
        rows: Span,
        *others: Span,
        dtypes: Sequence[str] | None = None,
    ) -> Tensor:
        """Return rows [R] or [R, C] of a tensor of that whole shape: floats as stored, or widened.

        Args:
            name: of the family's tensor.
            shape: that it must have, of one axis or two.
            rows: of the first.
            others: of the second, if not all.
            dtypes: none but the types that such a file may have.

        Raises:
            ValueError: if the tensor is missing or has another shape or type than it must.
        """
        assert dtypes is None, "what a linear lies in is one tensor here"
        stored = self._index.find(name, shape)
        index = self._rows(stored, rows)
        if len(shape) == 1:
            part = self._plain_rows(stored, Span(0, shape[0]), None)[0][index]
            return part.float() - 1 if stored.change == "less one" else part
        assert len(shape) == 2 and len(others) < 2, f"{name} has more axes"
        columns = others[0] if others else Span(0, shape[1])
        if stored.place.info.type.is_plain:
            return self._plain_rows(stored, columns, index)
        widened = torch.empty(len(rows), len(columns), dtype=self._dtype)
        step = max(1, WIDENED_AT_ONCE // shape[1])
        for first in range(0, len(rows), step):
            some = index[first : first + step]
            widened[first : first + len(some)] = self._widened_rows(stored, columns, some)
        return widened

    def _rows(self, stored: Stored, rows: Span) -> Tensor:
        """Return which rows of the file's tensor some of the family's are.

        Where they take turns, row 2 i + h of a head is row i of its half h in the family's.
        """
        index = torch.arange(rows.start, rows.stop)
        if stored.change != "turns":
            return index
        head_dim = self._config.head_dim
        head, feature = index // head_dim, index % head_dim
        half = head_dim // 2
        return head * head_dim + 2 * (feature % half) + feature // half

    def _plain_rows(self, stored: Stored, columns: Span, index: Tensor | None) -> Tensor:
        """Return columns of rows of floats as they are; None: of a tensor of one row, that."""
        kind = stored.place.info.type
        size = kind.num_bytes
        stored_bytes = self._bytes(stored, index, columns.start * size, columns.stop * size)
        return plain(kind, stored_bytes)

    def _widened_rows(self, stored: Stored, columns: Span, index: Tensor) -> Tensor:
        """Return columns of rows of codes, of the blocks that hold them."""
        kind = stored.place.info.type
        first, end = columns.start // kind.num_weights, -(-columns.stop // kind.num_weights)
        blocks = self._bytes(stored, index, first * kind.num_bytes, end * kind.num_bytes)
        weights = dequantize(kind, blocks.view(-1, kind.num_bytes)).view(len(index), -1)
        start = columns.start - first * kind.num_weights
        return weights[:, start : start + len(columns)]

    def _bytes(self, stored: Stored, index: Tensor | None, start: int, stop: int) -> Tensor:
        """Return some bytes [R, stop - start] uint8 of rows, copied from the file."""
        info = stored.place.info
        width = info.type.row_bytes(info.shape[-1])
        data = self._files[stored.place.file][info.start : info.start + info.num_bytes]
        whole = data.reshape(-1, width)
        if stored.expert is not None:
            num_rows = stored.shape[0]
            whole = whole[stored.expert * num_rows : (stored.expert + 1) * num_rows]
        rows = slice(0, 1) if index is None else index.numpy()
        return torch.from_numpy(np.array(whole[rows, start:stop]))
