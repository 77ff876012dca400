"""The forward pass of one rank: token ids in, logits of the sampled rows out.

Owns the model's weights and what follows from its shape. Keeps nothing between two calls; KV pages
and adapters belong to others and come as arguments. Knows nothing of plans or sampling.

Shapes: T rows, S rows that are sampled, H hidden, V vocabulary entries of this rank.
"""

from pathlib import Path

import torch
from torch import Tensor

from kernels.elementwise import add_rms_norm
from kernels.linear import linear
from worker.adapter_bank import AdapterBank
from worker.batch import DeviceBatch
from worker.kv_cache import KVCache
from worker.layers import DecoderLayer, LayerContext, LayerShape
from worker.model_config import ModelConfig
from worker.parallel import Communicator
from worker.partition import Partition, even_spans
from worker.rope import rope_tables
from worker.vocabulary import adapted_logits, embed, gather_logits
from worker.weights import Weights, load_weights


class Model:
    """One rank's slice of a model."""

    def __init__(
        self,
        config: ModelConfig,
        part: Partition,
        weights: Weights,
        group: Communicator,
        max_positions: int,
    ) -> None:
        cos, sin = rope_tables(config.rope, config.head_dim, max_positions)
        shape = LayerShape(
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
        self._layers = [DecoderLayer(shape, layer, group) for layer in weights.layers]

    @classmethod
    def load(
        cls,
        model_dir: Path,
        config: ModelConfig,
        part: Partition,
        group: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> "Model":
        """Read one rank's slices of a checkpoint.

        Raises:
            FileNotFoundError: if a file is missing.
            ValueError: if the checkpoint does not fit the config.
        """
        weights = load_weights(model_dir, config, part, dtype, device)
        return cls(config, part, weights, group, max_positions)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._weights.num_bytes

    def forward(self, batch: DeviceBatch, cache: KVCache, bank: AdapterBank) -> Tensor | None:
        """Write K and V of every row and return the logits of the sampled rows.

        Returns:
            [S, vocabulary] float32 on rank 0; None on other ranks and where nothing is sampled.
        """
        segments = bank.segments(batch.runs)
        x_TH = embed(
            batch.token_ids,
            self._weights.embedding,
            self._vocabulary,
            self._group,
            bank.embeddings(batch.runs),
        )
        residual_TH: Tensor | None = None
        for index, layer in enumerate(self._layers):
            k_pages, v_pages = cache.layer(index)
            context = LayerContext(
                batch.attention, k_pages, v_pages, segments[index] if segments else None
            )
            x_TH, residual_TH = layer.forward(x_TH, residual_TH, context)
        if batch.sample_rows.numel() == 0:
            return None
        assert residual_TH is not None, "a model has at least one layer"
        x_SH, _ = add_rms_norm(
            x_TH[batch.sample_rows],
            residual_TH[batch.sample_rows],
            self._weights.final_norm,
            self._eps,
        )
        heads = bank.heads(batch.runs)
        if heads:
            sample_rows = batch.sample_rows.tolist()
            y_SV = adapted_logits(x_SH, sample_rows, self._weights.lm_head, heads)
        else:
            y_SV = linear(x_SH, self._weights.lm_head)
        return gather_logits(y_SV, self._vocabulary_widths, self._group)
