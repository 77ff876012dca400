"""Weight loader: reads one rank's slices of a checkpoint and prepares them for the forward pass.

Owns their fusing into wide linears. Each rank reads from the files only what
`worker.weights.partition` gives it, one linear at a time, so that the peak is one copy of its
slices and one linear.

Shapes: H hidden, HQ / HK query and KV heads of this rank, D head_dim, I MLP features of this rank,
V vocabulary entries of this rank.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear import LinearWeight, Prepare, prepare_linear
from worker.model_config import ModelConfig
from worker.weights.checkpoint import Checkpoint
from worker.weights.checkpoint_files import check_checkpoint
from worker.weights.model_weights import LayerWeights, Weights
from worker.weights.partition import ROW_PARALLEL, Partition, Span, module_shape
from worker.weights.tensor_names import (
    EMBEDDING_NAME,
    FINAL_NORM_NAME,
    HEAD_NAME,
    SCORE_NAME,
    layer_name,
    linear_name,
)

__all__ = ["EMBEDDING_NAME", "HEAD_NAME", "linear_name", "load_weights", "release_free_heap"]


class _Loader:
    """Loads slices of one checkpoint for one rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        part: Partition,
        dtype: torch.dtype,
        device: torch.device,
        prepare: Prepare,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._part = part
        self._dtype = dtype
        self._device = device
        self.prepare = prepare

    def vector(self, name: str, size: int) -> Tensor:
        """Return a whole [size] tensor."""
        whole = self._checkpoint.read(name, (size,), Span(0, size))
        return whole.to(self._device, self._dtype)

    def vocabulary(self, name: str) -> Tensor:
        """Return this rank's rows of a [vocabulary, H] tensor."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        rows = self._checkpoint.read(name, shape, self._part.vocab)
        return rows.to(self._device, self._dtype)

    def score_head(self, num_labels: int) -> Tensor:
        """Return the whole head [labels, H] of a model that classifies, float32."""
        shape = (num_labels, self._config.hidden_size)
        whole = self._checkpoint.read(SCORE_NAME, shape, Span(0, num_labels))
        return whole.to(self._device, torch.float32)

    def linear(self, prefix: str, modules: tuple[str, ...], has_bias: bool) -> LinearWeight:
        """Return the modules' slices one above the other as one linear."""
        spans = [self._part.slices(module) for module in modules]
        num_rows, num_columns = sum(len(rows) for rows, _ in spans), len(spans[0][1])
        weight = torch.empty(num_rows, num_columns, dtype=self._dtype, device=self._device)
        bias = torch.zeros(num_rows, dtype=self._dtype, device=self._device) if has_bias else None
        start = 0
        for module, (rows, columns) in zip(modules, spans, strict=True):
            stop = start + len(rows)
            shape = module_shape(self._config, module)
            name = f"{prefix}.{module}"
            weight[start:stop] = self._checkpoint.read(f"{name}.weight", shape, rows, columns)
            if bias is not None:
                bias[start:stop] = self._checkpoint.read(f"{name}.bias", shape[:1], rows)
            start = stop
        if self._part.rank > 0 and modules[0] in ROW_PARALLEL:
            bias = None  # this linear is summed over the ranks, and its bias must enter once
        return self.prepare(weight, bias)

    def layer(self, index: int) -> LayerWeights:
        """Return one decoder layer."""
        config = self._config
        prefix = layer_name(index)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = [
            self.vector(f"{attention}.{name}_norm.weight", config.head_dim)
            for name in ("q", "k")
            if config.qk_norm
        ]
        return LayerWeights(
            input_norm=self.vector(f"{prefix}.input_layernorm.weight", config.hidden_size),
            qkv=self.linear(attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
            q_norm=norms[0] if config.qk_norm else None,
            k_norm=norms[1] if config.qk_norm else None,
            o=self.linear(attention, ("o_proj",), config.o_bias),
            mlp_norm=self.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            gate_up=self.linear(mlp, ("gate_proj", "up_proj"), config.mlp_bias),
            down=self.linear(mlp, ("down_proj",), config.mlp_bias),
        )


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    part: Partition,
    dtype: torch.dtype,
    device: torch.device,
    prepare: Prepare = prepare_linear,
) -> Weights:
    """Read one rank's slices of a checkpoint.

    Raises:
        OSError: if a file is missing or cannot be read.
        ValueError: if a tensor is missing, unknown, or of another shape or an integer type.
    """
    check_checkpoint(model_dir, config)
    with Checkpoint(model_dir) as checkpoint:
        loader = _Loader(checkpoint, config, part, dtype, device, prepare)
        embedding = loader.vocabulary(EMBEDDING_NAME)
        layers = tuple(loader.layer(index) for index in range(config.num_layers))
        final_norm = loader.vector(FINAL_NORM_NAME, config.hidden_size)
        if config.classifier is not None:
            head = loader.score_head(config.classifier.num_labels)
            return Weights(embedding, layers, final_norm, lm_head=None, score_head=head)
        # Looking up needs plain rows and multiplying wants them packed, so on a CPU a tied
        # lm_head is a second copy: the memory of one embedding for half of its time per step.
        lm_head = prepare(
            embedding if config.tie_word_embeddings else loader.vocabulary(HEAD_NAME), None
        )
    return Weights(embedding=embedding, layers=layers, final_norm=final_norm, lm_head=lm_head)


def release_free_heap() -> None:
    """Give freed memory back to the operating system, where malloc can (glibc's malloc_trim).

    Loading a model leaves a quarter of its size in free pieces of the heap.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
