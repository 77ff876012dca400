"""The forward pass of decoders on one rank, as a `ModelConfig` describes them.

Token ids in, this rank's logits of the sampled rows out: embedding, decoder layers, final norm and
lm_head. A model that classifies has no lm_head, and nothing is sampled of it. Owns in which way
each layer differs from the others. Keeps no state between two calls: KV pages, adapters and the
group are arguments.

Shapes: T rows, S rows that are sampled, H hidden, V vocabulary entries of this rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from worker.cache.kv_cache import KVCache
from worker.distributed.communicator import Communicator
from worker.lora.adapter_bank import AdaptedRows
from worker.lora.adapter_weights import AdapterHead
from worker.mixers.build import build_mixer
from worker.mixers.mixer import Mixer
from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.decoder_layer import DecoderLayer, LayerContext, LayerShape
from worker.models.embedding import embed, head_logits
from worker.models.experts import SparseMlp
from worker.models.forward_batch import ForwardBatch
from worker.models.rotary import rope_tables
from worker.pools import PoolName
from worker.sampling.row_logits import Argmax, RowLogits
from worker.spans import even_spans
from worker.weights.model_weights import LayerWeights, Weights
from worker.weights.partition import Partition


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
        # With the residual counted in units of `residual_multiplier`, blocks add to it as they are:
        # norms divide by its size anyway, and see the difference in their eps alone.
        unit = config.residual_multiplier
        multiplier = config.embedding_multiplier
        if config.is_multiplier_rounded:
            multiplier = torch.tensor(multiplier, dtype=weights.embedding.dtype).item()
        self._embedding_scale = multiplier / unit
        self._eps = config.rms_norm_eps / unit**2
        self._logits_scaling = config.logits_scaling
        self._experts = config.experts
        device = weights.embedding.device
        cos, sin = rope_tables(config.rope, config.head_dim, max_positions)
        scale, dim = config.attention_scale, config.head_dim
        widths = config.num_heads * dim, config.num_kv_heads * dim
        places = part.q_heads.start * dim, part.kv_heads.start * dim
        self._shape = LayerShape(
            num_heads=len(part.q_heads),
            num_kv_heads=len(part.kv_heads),
            head_dim=dim,
            attention_scale=dim**-0.5 if scale is None else scale,
            norm_eps=self._eps,
            block_norm_eps=config.rms_norm_eps,
            cos=cos.to(device),
            sin=sin.to(device),
            activation=config.activation,
            wide_norm=widths if config.qk_norm and config.qk_norm_is_wide else None,
            counts_kv=part.counts_kv,
            qk_places=places if part.has_exact_sums else None,
            has_gate=config.has_attention_gate,
        )
        self._vocabulary = part.vocab
        self._vocabulary_widths = [len(span) for span in even_spans(config.vocab_size, part.tp)]
        self._weights = weights
        self._group = group
        self._kernels = kernels
        self._layers = [
            DecoderLayer(
                shape,
                layer,
                kernels,
                _sparse_mlp(config, layer, kernels),
                _mixer(config, part, layer, kernels),
            )
            for shape, layer in zip(
                self._layer_shapes(config, max_positions), weights.layers, strict=True
            )
        ]

    def _layer_shapes(self, config: ModelConfig, max_positions: int) -> Iterator[LayerShape]:
        """Yield the shape of each layer; those of a kind share their tables."""
        rotated = sliding = nope = self._shape
        if config.sliding_rope is not None:
            cos, sin = rope_tables(config.sliding_rope, config.head_dim, max_positions)
            sliding = replace(rotated, cos=cos.to(rotated.cos), sin=sin.to(rotated.sin))
        if config.nope_layers:  # a turn by nothing, which changes no bit
            none = torch.zeros_like(rotated.sin)
            nope = replace(rotated, cos=torch.ones_like(none), sin=none)
        for layer in range(config.num_layers):
            slides = layer in config.sliding_layers
            shape = sliding if slides else rotated
            yield replace(
                nope if layer in config.nope_layers else shape,
                window=config.sliding_window if slides else None,
            )

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
    def experts(self) -> ExpertsConfig | None:
        """The experts of its sparse layers; None: it has none."""
        return self._experts

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
            This rank's logits of the sampled rows, [S, V] float32, as `row_logits` takes them, and
            what `hidden` returns; None where nothing of that kind is wanted.
        """
        x_TH, residual_TH = self.run_layers(
            self.embed(batch), batch.attention, batch.loras, cache, self._group
        )
        hidden = self.hidden(x_TH, residual_TH, hidden_rows)
        return self.logits(x_TH, residual_TH, batch), hidden

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Return the embeddings [T, H] of a batch, in the residual's unit."""
        x_TH = embed(
            batch.token_ids,
            self._weights.embedding,
            self._vocabulary,
            self._group,
            batch.embeddings,
        )
        return x_TH if self._embedding_scale == 1 else x_TH.float() * self._embedding_scale

    @property
    def whole_embedding(self) -> tuple[Tensor, float] | None:
        """The table [V, H] that `embed` looks tokens up in, and what it multiplies them by.

        None: this rank has not all of it. Adapters may have other embeddings.
        """
        return (self._weights.embedding, self._embedding_scale) if self._group.size == 1 else None

    def run_layers(
        self,
        x_TH: Tensor,
        attention: Mapping[PoolName, Any],
        loras: Sequence[Sequence[Any]] | None,
        cache: KVCache,
        group: Communicator,
    ) -> tuple[Tensor, Tensor]:
        """Take embeddings through all layers; return two [T, H] whose sum comes out.

        Args:
            x_TH: the embeddings.
            attention: where K and V, or states, lie of each kind of layers, as the kernels want it.
            loras: by layer and fused linear, likewise; None: no row has an adapter.
            cache: the KV pages.
            group: does the all-reduces.
        """
        residual_TH: Tensor | None = None
        for index, layer in enumerate(self._layers):
            of_layer = None if loras is None else loras[index]
            rows = attention[cache.pool_of(index)]
            context = LayerContext(rows, cache.layer(index), of_layer, group)
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
        """Return this rank's logits [S, V] as its part of all ranks'.

        All logits come through here, be they recorded or not: they are scaled here, in place.
        """
        if self._logits_scaling != 1:
            part_SV.div_(self._logits_scaling)
            if argmax is not None:
                argmax[0].div_(self._logits_scaling)
        return RowLogits(part_SV, self._vocabulary_widths, self._group, self._kernels, argmax)

    @property
    def _lm_head(self) -> LinearWeight:
        assert self._weights.lm_head is not None, "a model without lm_head draws no token"
        return self._weights.lm_head

    def _normed(self, x_SH: Tensor, residual_SH: Tensor) -> Tensor:
        norm, dtype = self._weights.final_norm, self._weights.layers[0].dtype
        normed_SH, _ = self._kernels.add_rms_norm(x_SH, residual_SH, norm, self._eps, dtype)
        return normed_SH


def _mixer(
    config: ModelConfig, part: Partition, weights: LayerWeights, kernels: AnyKernels
) -> Mixer | None:
    """Return what a layer has in place of attention, None if it attends."""
    if config.mixer is None or weights.mixer is None:
        return None
    assert part.mixer is not None, "a part of every mixer"
    return build_mixer(config.mixer, part.mixer, part.tp, weights.mixer, kernels)


def _sparse_mlp(
    config: ModelConfig, weights: LayerWeights, kernels: AnyKernels
) -> SparseMlp | None:
    """Return the experts of a layer, None if it has none."""
    if config.experts is None or weights.experts is None:
        return None
    return SparseMlp(config.experts, weights.experts, kernels)
