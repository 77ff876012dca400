"""The forward pass of one rank: token ids in, its logits of the sampled rows out.

Owns the model's weights and what follows from its shape. Keeps nothing between two calls; KV pages
and adapters belong to others and come as arguments. Knows nothing of plans or sampling.

Shapes: T rows, S rows that are sampled, H hidden, V vocabulary entries of this rank.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernels.dispatch import AnyKernels
from worker.cache.kv_cache import KVCache
from worker.distributed.parallel import Communicator
from worker.model_config import ModelConfig
from worker.models.decoder_layer import DecoderLayer, LayerContext, LayerShape
from worker.models.embedding import embed, head_logits
from worker.models.forward_batch import DeviceBatch
from worker.models.rotary import rope_tables
from worker.sampling.row_logits import Best, RowLogits
from worker.weights.model_weights import Weights
from worker.weights.partition import Partition, even_spans


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
    def num_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._weights.num_bytes

    def forward(self, batch: DeviceBatch, cache: KVCache) -> Tensor | None:
        """Write K and V of every row and return this rank's logits of the sampled rows.

        Returns:
            [S, V] float32; None where nothing is sampled.
        """
        x_TH, residual_TH = self.decode(
            self.embed(batch), batch.attention, batch.loras, cache, self._group
        )
        return self.logits(x_TH, residual_TH, batch)

    def embed(self, batch: DeviceBatch) -> Tensor:
        """Return the embeddings [T, H] of a batch."""
        return embed(
            batch.token_ids,
            self._weights.embedding,
            self._vocabulary,
            self._group,
            batch.embeddings,
        )

    def decode(
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
            cache: the pages.
            group: who sums.
        """
        residual_TH: Tensor | None = None
        for index, layer in enumerate(self._layers):
            k_pages, v_pages = cache.layer(index)
            of_layer = None if loras is None else loras[index]
            context = LayerContext(attention, k_pages, v_pages, of_layer, group)
            x_TH, residual_TH = layer.forward(x_TH, residual_TH, context)
        assert residual_TH is not None, "a model has at least one layer"
        return x_TH, residual_TH

    def logits(self, x_TH: Tensor, residual_TH: Tensor, batch: DeviceBatch) -> Tensor | None:
        """Return what `forward` does, of what `decode` returned."""
        if not batch.sample_rows:
            return None
        x_SH = self._normed(x_TH[batch.sample_index], residual_TH[batch.sample_index])
        y_SV = head_logits(
            x_SH, batch.sample_rows, self._weights.lm_head, batch.heads, self._kernels
        )
        return y_SV.float()

    def head(self, x_SH: Tensor, residual_SH: Tensor) -> Tensor:
        """Return what `logits` does for sampled rows whose adapters leave the head alone."""
        return self._kernels.linear(self._normed(x_SH, residual_SH), self._weights.lm_head)

    def row_logits(self, part_SV: Tensor, best: Best | None = None) -> RowLogits:
        """Return what `forward` returned as one part of all ranks' logits."""
        return RowLogits(part_SV, self._vocabulary_widths, self._group, self._kernels, best)

    def _normed(self, x_SH: Tensor, residual_SH: Tensor) -> Tensor:
        norm = self._weights.final_norm
        normed_SH, _ = self._kernels.add_rms_norm(x_SH, residual_SH, norm, self._eps)
        return normed_SH
