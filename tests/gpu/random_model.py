"""A small random model with random adapters: as a rank holds it, and as plain float64.

Owns the weights, how ranks share them, and what the whole model means. Everything comes from one
seed on the host, so that processes agree without talking.

Shapes: T rows, H hidden, V vocabulary, K inputs, N outputs, R lora_rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import reference
from kernels.linear import LinearWeight
from tests.llama_linears import LINEAR_MODULES
from tests.whole_modules import module_shape
from worker.linears import separate_linears
from worker.lora.shard import AdapterShard, LoraEntry
from worker.model_config import ModelConfig, RopeConfig
from worker.models.rotary import rope_tables
from worker.spans import Span
from worker.weights.model_weights import LayerWeights, Weights
from worker.weights.partition import Partition, partition

MAX_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    """LoRA weights: (layer, module) to (A [R, K], B [N, R], scaling), float32 on the host."""

    digest: str
    tensors: dict[tuple[int, str], tuple[Tensor, Tensor, float]]

    def cut(self, part: Partition) -> AdapterShard:
        """Return one rank's shard, as it comes out of the adapter pool."""
        entries, data = [], bytearray()
        for (layer, module), (a, b, scaling) in self.tensors.items():
            (rows,), columns = part.slices(module)
            pieces = (a[:, columns.start : columns.stop], b[rows.start : rows.stop])
            offsets = []
            for piece in (pieces[0], pieces[1].T):
                offsets.append(len(data))
                data += piece.contiguous().numpy().tobytes()
            shapes = [(piece.shape[0], piece.shape[1]) for piece in pieces]
            entries.append(
                LoraEntry(
                    layer, module, len(a), scaling, offsets[0], shapes[0], offsets[1], shapes[1]
                )
            )
        buffer = np.frombuffer(bytes(data), dtype=np.uint8)
        return AdapterShard(self.digest, part.rank, part.tp, "float32", tuple(entries), buffer)


class RandomModel:
    """The whole model on the host."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seed: int) -> None:
        self.config = config
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)
        self.linears = {
            (layer, module): self._matrix(*module_shape(config, module))
            for layer in range(config.num_layers)
            for module in LINEAR_MODULES
        }
        self.norms = [self._norm(config.hidden_size) for _ in range(2 * config.num_layers + 1)]
        self.head_norms = [
            self._norm(config.head_dim) if config.qk_norm else None
            for _ in range(2 * config.num_layers)
        ]
        self.embedding = self._normal(config.vocab_size, config.hidden_size)
        self.lm_head = self._matrix(config.vocab_size, config.hidden_size)

    def adapter(self, index: int, lora_ranks: Sequence[int]) -> RandomAdapter:
        """Return an adapter whose modules take lora_ranks in turn; 0: not adapted."""
        tensors = {}
        for number, (layer, module) in enumerate(self.linears):
            lora_rank = lora_ranks[number % len(lora_ranks)]
            if lora_rank:
                outputs, inputs = module_shape(self.config, module)
                a = self._normal(lora_rank, inputs) * inputs**-0.5
                b = self._normal(outputs, lora_rank) * lora_rank**-0.5
                tensors[layer, module] = (a, b, 0.25 * (1 + number % 3))
        return RandomAdapter(f"{index:064x}", tensors)

    def weights(self, part: Partition, device: torch.device) -> Weights:
        """Return what a rank holds."""

        def fused(layer: int, *modules: str) -> LinearWeight:
            pieces = []
            for module in modules:
                (rows,), columns = part.slices(module)
                whole = self.linears[layer, module]
                pieces.append(whole[rows.start : rows.stop, columns.start : columns.stop])
            return linear_weight(torch.cat(pieces).to(device))

        def there(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        layers = tuple(
            LayerWeights(
                input_norm=self.norms[2 * i].to(device),
                qkv=fused(i, "q_proj", "k_proj", "v_proj"),
                q_norm=there(self.head_norms[2 * i]),
                k_norm=there(self.head_norms[2 * i + 1]),
                o=fused(i, "o_proj"),
                mlp_norm=self.norms[2 * i + 1].to(device),
                gate_up=fused(i, "gate_proj", "up_proj"),
                down=fused(i, "down_proj"),
            )
            for i in range(self.config.num_layers)
        )
        held = _slice(part.vocab)
        return Weights(
            embedding=self.embedding[held].to(device),
            layers=layers,
            final_norm=self.norms[-1].to(device),
            lm_head=linear_weight(self.lm_head[held].contiguous().to(device)),
        )

    def logits(self, token_ids: Sequence[int], adapter: RandomAdapter | None) -> Tensor:
        """Return float64 logits [T, V] of every row of one sequence, LoRAs merged into weights."""
        config, eps = self.config, self.config.rms_norm_eps
        positions = torch.arange(len(token_ids))
        tables = rope_tables(config.rope, config.head_dim, len(token_ids))
        cos, sin = (table.double() for table in tables)
        x = self.embedding.double()[torch.tensor(token_ids)]
        for i in range(config.num_layers):
            h = reference.rms_norm(x, self.norms[2 * i].double(), eps)
            q, k, v = (
                reference.linear(h, self._merged(i, module, adapter)).unflatten(
                    1, (-1, config.head_dim)
                )
                for module in ("q_proj", "k_proj", "v_proj")
            )
            norms = self.head_norms[2 * i : 2 * i + 2]
            if norms[0] is not None and norms[1] is not None:
                q = reference.rms_norm(q, norms[0].double(), eps)
                k = reference.rms_norm(k, norms[1].double(), eps)
            q = reference.apply_rope(q, cos, sin, positions)
            k = reference.apply_rope(k, cos, sin, positions)
            out = reference.attention(q, k, v, config.head_dim**-0.5).flatten(1)
            x = x + reference.linear(out, self._merged(i, "o_proj", adapter))
            h = reference.rms_norm(x, self.norms[2 * i + 1].double(), eps)
            gate_up = torch.cat(
                [
                    reference.linear(h, self._merged(i, module, adapter))
                    for module in ("gate_proj", "up_proj")
                ],
                dim=1,
            )
            h = reference.silu_and_mul(gate_up)
            x = x + reference.linear(h, self._merged(i, "down_proj", adapter))
        x = reference.rms_norm(x, self.norms[-1].double(), eps)
        return reference.linear(x, self.lm_head.double())

    def _merged(self, layer: int, module: str, adapter: RandomAdapter | None) -> Tensor:
        """Return W + scaling B A in float64, of A and B as they are rounded when loaded."""
        weight = self.linears[layer, module].double()
        if adapter is None or (layer, module) not in adapter.tensors:
            return weight
        a, b, scaling = adapter.tensors[layer, module]
        return weight + (b * scaling).to(self.dtype).double() @ a.to(self.dtype).double()

    def _matrix(self, outputs: int, inputs: int) -> Tensor:
        return (self._normal(outputs, inputs) * inputs**-0.5).to(self.dtype)

    def _norm(self, width: int) -> Tensor:
        return (1 + 0.2 * self._normal(width)).to(self.dtype)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)


def linear_weight(data: Tensor) -> LinearWeight:
    """Return a weight that stays as it is, on any device."""
    return LinearWeight(data, None, data.shape[1], data.shape[0], data.dtype)


def llama_config(
    num_layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int, int],
    vocab: int,
    *,
    qk_norm: bool = False,
) -> ModelConfig:
    """Return the shape of a Llama; `heads` are (query heads, KV heads, head_dim)."""
    return ModelConfig(
        family="qwen3" if qk_norm else "llama",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=vocab,
        max_position=131_072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0),
        tie_word_embeddings=False,
        linears=separate_linears(),
        qk_norm=qk_norm,
        dtype="bfloat16",
        bos_token_id=None,
        eos_token_ids=(),
    )


def parts_of(config: ModelConfig, tp: int) -> list[Partition]:
    """Return what each rank holds."""
    return [partition(config, tp, rank) for rank in range(tp)]


def _slice(span: Span) -> slice:
    return slice(span.start, span.stop)
