"""The base model's weights as its checkpoint has them, read anew while adapters are loaded.

The forward pass keeps weights packed, fused and cut, but DoRA's norms need plain rows, for
row-parallel modules whole ones. Owns reading them slice by slice from the memory-mapped files,
which needs no other rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from worker.lora.shard import EMBEDDING
from worker.model_config import ModelConfig
from worker.spans import Span
from worker.weights.checkpoint import AnyCheckpoint, open_checkpoint, read_weight
from worker.weights.loader import EMBEDDING_NAME, HEAD_NAME, linear_name
from worker.weights.partition import Partition, partition, whole_shape


class OpenWeights:
    """The open files; every tensor comes in the dtype that is served."""

    def __init__(
        self, checkpoint: AnyCheckpoint, config: ModelConfig, part: Partition, dtype: torch.dtype
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._part = part
        self._whole = partition(config, 1, 0)
        self.dtype = dtype

    def rows(self, layer: int, module: str, rows: Span) -> Tensor:
        """Return whole rows of a linear module of a layer, [rows, in]."""
        name = linear_name(layer, self._part.linear(module))
        shape = whole_shape(self._whole, module)
        columns = Span(0, shape[1])
        weight = read_weight(self._checkpoint, self._config, name, shape, rows, columns)
        return weight.to(self.dtype)

    def bias(self, layer: int, module: str) -> Tensor | None:
        """Return what this rank adds to its outputs of a linear module, None for nothing."""
        linear = self._part.linear(module)
        if not linear.has_bias or (linear.axis == "row" and self._part.rank > 0):
            return None
        name = f"{linear_name(layer, linear)}.bias"
        outputs, _ = whole_shape(self._whole, module)
        rows, _ = self._part.slices(module)
        parts = [self._checkpoint.read(name, (outputs,), span) for span in rows]
        return torch.cat(parts).to(self.dtype)

    def vocabulary(self, module: str, rows: Span) -> Tensor:
        """Return rows of the embedding or of the head, [rows, hidden]."""
        is_embedding = module == EMBEDDING or self._config.tie_word_embeddings
        name = EMBEDDING_NAME if is_embedding else HEAD_NAME
        shape = (self._config.vocab_size, self._config.hidden_size)
        return self._checkpoint.read(name, shape, rows).to(self.dtype)


class BaseWeights:
    """Where one rank can read the base model's weights, and the dtype they are served in."""

    def __init__(
        self, model_dir: Path, config: ModelConfig, part: Partition, dtype: torch.dtype
    ) -> None:
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
            yield OpenWeights(checkpoint, self._config, self._part, self.dtype)
