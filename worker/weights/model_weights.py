"""One rank's weights of a model as the forward pass takes them, and their batch-invariance test.

Libraries choose the inner loops of a product by its number of rows and by the CPU, so that a row's
bits do not depend on its batch is tested anew on each machine.

Shapes: H hidden, HQ / HK query and KV heads of this rank, D head_dim, I MLP features of this rank,
V vocabulary entries of this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight

_BATCH_SIZES = (2, 3, 17, 64)  # rows


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
    lm_head: LinearWeight | None  # [V, H]; None: the model classifies
    score_head: Tensor | None = None  # [labels, H] float32, whole on every rank

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; what is shared counts once."""
        norms = [self.final_norm]
        linears = []
        for layer in self.layers:
            norms += [layer.input_norm, layer.mlp_norm]
            norms += [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
            linears += [layer.qkv, layer.o, layer.gate_up, layer.down]
        if self.lm_head is not None and self.lm_head.data is not self.embedding:
            linears.append(self.lm_head)
        plain = 0 if self.score_head is None else self.score_head.nbytes
        plain += self.embedding.nbytes + sum(norm.nbytes for norm in norms)
        return plain + sum(linear.num_bytes for linear in linears)


def batch_variant_linears(weights: Weights, kernels: AnyKernels) -> tuple[str, ...]:
    """Return the names of the linears in which the bits of a row depend on its batch."""
    layer = weights.layers[0]
    linears: dict[str, LinearWeight | None] = {
        "qkv": layer.qkv,
        "o": layer.o,
        "gate_up": layer.gate_up,
        "down": layer.down,
        "lm_head": weights.lm_head,
    }
    device = weights.embedding.device
    with torch.inference_mode():
        return tuple(
            name
            for name, weight in linears.items()
            if weight is not None and not _is_batch_invariant(weight, kernels, device)
        )


def _is_batch_invariant(weight: LinearWeight, kernels: AnyKernels, device: torch.device) -> bool:
    x = _rows(max(_BATCH_SIZES), weight.in_features).to(device, weight.dtype)
    alone = [kernels.linear(x[row : row + 1], weight) for row in (0, 1)]
    return all(
        torch.equal(kernels.linear(x[:size], weight)[:2], torch.cat(alone)) for size in _BATCH_SIZES
    )


def _rows(num_rows: int, width: int) -> Tensor:
    """Return numbers [num_rows, width] float32 without a pattern that sums could hide behind."""
    return torch.arange(num_rows * width, dtype=torch.float32).square_().sin_().view(num_rows, -1)
