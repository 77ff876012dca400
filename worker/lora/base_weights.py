"""The base model's weights as its checkpoint has them, read anew while adapters are loaded.

The forward pass keeps weights packed, fused and cut, but DoRA's norms need plain rows, for
row-parallel modules whole ones. Owns reading them slice by slice from the memory-mapped files,
which needs no other rank. Of linears that are quantized as they are loaded comes what their codes
stand for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from kernels.quantized import (
    HEAD_METHOD,
    QuantizationMethod,
    Quantizer,
    dequantize,
    quantize,
)
from worker.lora.shard import EMBEDDING, HEAD
from worker.model_config import ModelConfig
from worker.spans import Span
from worker.weights.checkpoint import AnyCheckpoint, open_checkpoint, read_weight
from worker.weights.loader import EMBEDDING_NAME, HEAD_NAME, linear_name
from worker.weights.partition import Partition, partition, whole_shape


class OpenWeights:
    """The open files; every tensor comes in the dtype that is served, quantized ones in float32."""

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        config: ModelConfig,
        part: Partition,
        dtype: torch.dtype,
        quantizer: Quantizer | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._part = part
        self._whole = partition(config, 1, 0)
        self.dtype = dtype
        self._quantizer = quantizer

    def rows(self, layer: int, module: str, rows: Span) -> Tensor:
        """Return whole rows of a linear module of a layer, [rows, in], as they are multiplied."""
        linear = self._part.linear(module)
        name = linear_name(layer, linear)
        shape = whole_shape(self._whole, module)
        columns = Span(0, shape[1])
        weight = read_weight(self._checkpoint, self._config, name, shape, rows, columns)
        if self._quantizer is None or linear.is_router:
            return weight.to(self.dtype)
        method = self._quantizer.method
        is_rotated = self._part.has_whole_groups(module)
        cuts = self._cuts(module)
        parts = [_rounded(weight[:, own], method, is_rotated=is_rotated) for own in cuts]
        return torch.cat(parts, dim=1)

    def _cuts(self, module: str) -> list[slice]:
        """Return the inputs of a linear module that each rank has, and quantizes by itself."""
        assert self._quantizer is not None, "a question of scales"
        if not self._part.is_summed(module) or self._part.has_exact_sums:
            return [slice(None)]
        ranks = (partition(self._config, self._part.tp, rank) for rank in range(self._part.tp))
        spans = [part.slices(module)[1] for part in ranks]
        return [slice(span.start, span.stop) for span in spans]

    def bias(self, layer: int, module: str) -> Tensor | None:
        """Return what this rank adds to its outputs of a linear module, None for nothing."""
        linear = self._part.linear(module)
        if not linear.has_bias or not self._part.adds_bias(linear):
            return None
        name = f"{linear_name(layer, linear)}.bias"
        outputs, _ = whole_shape(self._whole, module)
        rows, _ = self._part.slices(module)
        parts = [self._checkpoint.read(name, (outputs,), span) for span in rows]
        return torch.cat(parts).to(self.dtype)

    def head_rows(self, rows: Span) -> Tensor:
        """Return rows of the head, [rows, hidden], as they are multiplied."""
        weight = self.vocabulary(HEAD, rows)
        return weight if self._quantizer is None else _rounded(weight, HEAD_METHOD)

    def vocabulary(self, module: str, rows: Span) -> Tensor:
        """Return rows of the embedding or of the head, [rows, hidden], as the checkpoint has them.

        What is quantized of them has the dtype that is served before, as while it is loaded.
        """
        is_embedding = module == EMBEDDING or self._config.tie_word_embeddings
        name = EMBEDDING_NAME if is_embedding else HEAD_NAME
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._checkpoint.read(name, shape, rows).to(self.dtype)


class BaseWeights:
    """Where one rank can read the base model's weights, and the dtype they are served in."""

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        part: Partition,
        dtype: torch.dtype,
        quantizer: Quantizer | None = None,
    ) -> None:
        self._quantizer = quantizer
        self._model_dir = model_dir
        self._config = config
        self._part = part
        self._whole = partition(config, 1, 0)
        self.dtype = dtype

    @contextmanager
    def opened(self) -> Iterator[OpenWeights]:
        """Open the files for as long as the context lasts.

        Raises:
            FileNotFoundError: if they are gone.
            ValueError: if they are not what was loaded.
        """
        with open_checkpoint(self._model_dir, self._config, self.dtype) as checkpoint:
            yield OpenWeights(checkpoint, self._config, self._part, self.dtype, self._quantizer)


def _rounded(weight: Tensor, method: QuantizationMethod, *, is_rotated: bool = True) -> Tensor:
    """Return what the codes of a weight stand for."""
    return dequantize(quantize(weight, method, is_rotated=is_rotated))
