"""What one rank holds of a model, ready for the forward pass. Knows nothing of files.

Shapes: H hidden, HQ / HK query and KV heads of this rank, D head_dim, I MLP features of this rank,
V vocabulary entries of this rank.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.linear import LinearWeight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms are whole on every rank."""

    input_norm: Tensor  # [H]
    qkv: LinearWeight  # [(HQ + 2 HK) D, H]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: LinearWeight  # [H, HQ D]
    mlp_norm: Tensor  # [H]
    gate_up: LinearWeight  # [2 I, H], the gate first
    down: LinearWeight  # [H, I]


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything one rank holds of a model."""

    embedding: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [H]
    lm_head: LinearWeight  # [V, H]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; what is shared counts once."""
        norms = [self.final_norm]
        linears = []
        for layer in self.layers:
            norms += [layer.input_norm, layer.mlp_norm]
            norms += [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
            linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
        if self.lm_head.data is not self.embedding:
            linears.append(self.lm_head)
        plain = self.embedding.nbytes + sum(norm.nbytes for norm in norms)
        return plain + sum(linear.num_bytes for linear in linears)
