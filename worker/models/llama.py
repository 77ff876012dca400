"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) on one rank.

Token ids in, this rank's logits of the sampled rows out: embedding, decoder layers, final norm and
lm_head. A model that classifies has no lm_head, and nothing is sampled of it. Owns the order of the
operations and the two all-reduces of a layer. Keeps no state between two calls: KV pages, adapters
and the group are arguments.

Shapes: T rows, S rows that are sampled, H hidden, HQ / HK query and KV heads of this rank, D
head_dim, I MLP features of this rank, V vocabulary entries of this rank, M positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from worker.cache.kv_cache import KVCache
from worker.distributed.communicator import Communicator
from worker.lora.adapter_bank import AdaptedRows
from worker.lora.adapter_weights import DOWN, GATE_UP, OUT, QKV, AdapterHead
from worker.model_config import ModelConfig
from worker.models.embedding import embed, head_logits
from worker.models.forward_batch import ForwardBatch
from worker.models.rotary import rope_tables
from worker.sampling.row_logits import Argmax, RowLogits
from worker.weights.model_weights import LayerWeights, Weights
from worker.weights.partition import Partition, even_spans


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the layers of one rank have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    cos: Tensor  # [M, D/2] float32
    sin: Tensor  # [M, D/2] float32


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The arguments of one call of one layer besides the hidden states."""

    attention: Any  # the rows, as the kernels want them
    k_pages: Tensor  # [P, HK, page, D]
    v_pages: Tensor  # [P, HK, page, D]
    loras: Sequence[Any] | None  # by fused linear, likewise; None: no row has an adapter
    group: Communicator


class DecoderLayer:
    """Attention and MLP of one layer."""

    def __init__(self, shape: LayerShape, weights: LayerWeights, kernels: AnyKernels) -> None:
        self._shape = shape
        self._weights = weights
        self._kernels = kernels

    def forward(
        self, x_TH: Tensor, residual_TH: Tensor | None, context: LayerContext
    ) -> tuple[Tensor, Tensor]:
        """Return (output, residual) whose sum is the layer's output; `None` before the first.

        The residual is float32, whatever the type of the weights.
        """
        weights, kernels, eps = self._weights, self._kernels, self._shape.rms_norm_eps
        x_TH, residual_TH = kernels.add_rms_norm(x_TH, residual_TH, weights.input_norm, eps)
        x_TH = self._attend(x_TH, context)
        x_TH, residual_TH = kernels.add_rms_norm(x_TH, residual_TH, weights.mlp_norm, eps)
        gate_up_TI2 = self._linear(x_TH, weights.gate_up, context, GATE_UP)
        x_TI = kernels.silu_and_mul(gate_up_TI2, weights.down.dtype)
        return self._summed(x_TI, weights.down, context, DOWN), residual_TH

    def _attend(self, x_TH: Tensor, context: LayerContext) -> Tensor:
        shape, weights, kernels = self._shape, self._weights, self._kernels
        qkv = self._linear(x_TH, weights.qkv, context, QKV)
        q_TQD = kernels.rope_and_write(
            qkv.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim),
            shape.num_heads,
            shape.cos,
            shape.sin,
            context.attention,
            context.k_pages,
            context.v_pages,
            weights.q_norm,
            weights.k_norm,
            shape.rms_norm_eps,
        )
        out_TQD = kernels.paged_attention(
            q_TQD, context.k_pages, context.v_pages, context.attention, shape.head_dim**-0.5
        )
        return self._summed(out_TQD.flatten(1), weights.o, context, OUT)

    def _linear(
        self, x: Tensor, weight: LinearWeight, context: LayerContext, fused_linear: int
    ) -> Tensor:
        """Return the linear's output with each row's own LoRA added."""
        y = self._kernels.linear(x, weight)
        if context.loras is not None:
            self._kernels.lora_apply(y, x, context.loras[fused_linear])
        return y

    def _summed(
        self, x: Tensor, weight: LinearWeight, context: LayerContext, fused_linear: int
    ) -> Tensor:
        """Return the sum over the ranks of a linear whose inputs they share, LoRA with it.

        The delta is added to this rank's part of the sum, so one all-reduce serves both.
        """
        y = self._kernels.partial_linear(x, weight)
        if context.loras is not None:
            self._kernels.lora_apply(y, x, context.loras[fused_linear])
        return context.group.all_reduce(y)


class Model:
    """One rank's slice of a model."""

    def __init__(
        self,
        config: ModelConfig,
        part: Partition,
        weights: Weights,
        group: Communicator,
        kernels: AnyKernels,
        max_positions: int,
    ) -> None:
        cos, sin = rope_tables(config.rope, config.head_dim, max_positions)
        self._shape = LayerShape(
            num_heads=len(part.q_heads),
            num_kv_heads=len(part.kv_heads),
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            cos=cos.to(weights.embedding.device),
            sin=sin.to(weights.embedding.device),
        )
        self._eps = config.rms_norm_eps
        self._vocabulary = part.vocab
        self._vocabulary_widths = [len(span) for span in even_spans(config.vocab_size, part.tp)]
        self._weights = weights
        self._group = group
        self._kernels = kernels
        self._layers = [DecoderLayer(self._shape, layer, kernels) for layer in weights.layers]

    @property
    def hidden_size(self) -> int:
        """Features of a row."""
        return self._weights.final_norm.shape[0]

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self._shape.head_dim

    @property
    def group_size(self) -> int:
        """Query heads of this rank that share a KV head."""
        return self._shape.num_heads // self._shape.num_kv_heads

    @property
    def score_head(self) -> Tensor | None:
        """The head [labels, H] float32 of a model that classifies."""
        return self._weights.score_head

    @property
    def has_lm_head(self) -> bool:
        """Whether tokens can be drawn."""
        return self._weights.lm_head is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._weights.num_bytes

    def forward(
        self, batch: ForwardBatch, cache: KVCache, hidden_rows: Sequence[int] = ()
    ) -> tuple[Tensor | None, Tensor | None]:
        """Write K and V of every row.

        Returns:
            This rank's logits of the sampled rows, [S, V] float32, and what `hidden` returns; None
            where nothing of that kind is wanted.
        """
        x_TH, residual_TH = self.run_layers(
            self.embed(batch), batch.attention, batch.loras, cache, self._group
        )
        hidden = self.hidden(x_TH, residual_TH, hidden_rows)
        return self.logits(x_TH, residual_TH, batch), hidden

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings [T, H] of a batch."""
        return embed(
            batch.token_ids,
            self._weights.embedding,
            self._vocabulary,
            self._group,
            batch.embeddings,
        )

    def run_layers(
        self,
        x_TH: Tensor,
        attention: Any,
        loras: Sequence[Sequence[Any]] | None,
        cache: KVCache,
        group: Communicator,
    ) -> tuple[Tensor, Tensor]:
        """Take embeddings through all layers; return two [T, H] whose sum comes out.

        Args:
            x_TH: the embeddings.
            attention: where K and V lie, as the kernels want it.
            loras: by layer and fused linear, likewise; None: no row has an adapter.
            cache: the KV pages.
            group: does the all-reduces.
        """
        residual_TH: Tensor | None = None
        for index, layer in enumerate(self._layers):
            k_pages, v_pages = cache.layer(index)
            of_layer = None if loras is None else loras[index]
            context = LayerContext(attention, k_pages, v_pages, of_layer, group)
            x_TH, residual_TH = layer.forward(x_TH, residual_TH, context)
        assert residual_TH is not None, "a model has at least one layer"
        return x_TH, residual_TH

    def logits(self, x_TH: Tensor, residual_TH: Tensor, batch: ForwardBatch) -> Tensor | None:
        """Return the logits that `forward` does, of what `run_layers` returned."""
        if not batch.sample_rows:
            return None
        x_SH = self._normed(x_TH[batch.sample_index], residual_TH[batch.sample_index])
        y_SV = head_logits(x_SH, batch.sample_rows, self._lm_head, batch.heads, self._kernels)
        return y_SV.float()

    def hidden(self, x_TH: Tensor, residual_TH: Tensor, rows: Sequence[int]) -> Tensor | None:
        """Return the states of R rows after the final norm, of what `run_layers` returned.

        Returns:
            [R, H] as linears take it; None where no rows are wanted.
        """
        if not rows:
            return None
        index = self._kernels.send(rows, torch.int64, x_TH.device)
        return self._normed(x_TH[index], residual_TH[index])

    def hidden_logits(
        self, x_RH: Tensor, rows: Sequence[int], heads: Sequence[AdaptedRows[AdapterHead]]
    ) -> Tensor:
        """Return this rank's logits [R, V] float32 of rows of a batch that `hidden` returned."""
        return head_logits(x_RH, rows, self._lm_head, heads, self._kernels).float()

    def head(self, x_SH: Tensor, residual_SH: Tensor) -> Tensor:
        """Return what `logits` does for sampled rows whose adapters leave the head alone."""
        return self._kernels.linear(self._normed(x_SH, residual_SH), self._lm_head)

    def row_logits(self, part_SV: Tensor, argmax: Argmax | None = None) -> RowLogits:
        """Return this rank's logits [S, V] as its part of all ranks'."""
        return RowLogits(part_SV, self._vocabulary_widths, self._group, self._kernels, argmax)

    @property
    def _lm_head(self) -> LinearWeight:
        assert self._weights.lm_head is not None, "a model without lm_head draws no token"
        return self._weights.lm_head

    def _normed(self, x_SH: Tensor, residual_SH: Tensor) -> Tensor:
        norm = self._weights.final_norm
        normed_SH, _ = self._kernels.add_rms_norm(x_SH, residual_SH, norm, self._eps)
        return normed_SH
