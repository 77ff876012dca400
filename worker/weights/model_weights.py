"""One rank's weights of a model as the forward pass takes them, and their batch-invariance test.

Libraries choose the inner loops of a product by its number of rows and by the CPU, so that a row's
bits do not depend on its batch is tested anew on each machine.

Shapes: H hidden, HQ / HK query and KV heads of this rank, D head_dim, I MLP features of this rank,
also of an expert, E experts, V vocabulary entries of this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts import ExpertsWeight, Routing
from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from worker.mixers.build import MixerWeights

_BATCH_SIZES = (2, 3, 17, 64)  # rows


@dataclass(frozen=True, slots=True)
class SparseWeights:
    """The experts of one layer; ranks share out their features, and the router is whole."""

    router: LinearWeight  # [E, H], and the gate of the MLP beside them behind, if it has one
    gate_up: ExpertsWeight  # [E, 2 I, H], the gate first
    down: ExpertsWeight  # [E, H, I]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return self.router.num_bytes + self.gate_up.num_bytes + self.down.num_bytes


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms [H] and [D] are whole on every rank."""

    input_norm: Tensor | None  # [H]
    qkv: LinearWeight | None  # [(HQ + 2 HK) D, H], [HQ D, H] of gates before it; None: a mixer
    q_norm: Tensor | None  # [D], or [HQ D] over all heads together
    k_norm: Tensor | None  # [D], or [HK D]
    o: LinearWeight | None  # [H, HQ D]
    mlp_norm: Tensor | None  # [H]
    gate_up: LinearWeight | None  # [2 I, H], the gate first; None: experts alone
    down: LinearWeight | None  # [H, I]
    after_attention_norm: Tensor | None = None  # [H], of what joins the residual
    after_mlp_norm: Tensor | None = None  # [H], likewise
    experts: SparseWeights | None = None  # beside gate_up and down, or in place of them
    sinks: Tensor | None = None  # [HQ] float32
    mixer: MixerWeights | None = None  # in place of attention

    @property
    def dtype(self) -> torch.dtype:
        """What products take their inputs in."""
        if self.mixer is not None:
            return self.mixer.in_proj.dtype
        assert self.qkv is not None, "a layer without a mixer attends"
        return self.qkv.dtype

    def norms(self) -> list[Tensor]:
        """Return those that there are."""
        of_blocks = self.input_norm, self.after_attention_norm, self.mlp_norm, self.after_mlp_norm
        return [norm for norm in (*of_blocks, self.q_norm, self.k_norm) if norm is not None]


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
        norms = [self.final_norm, *(one.sinks for one in self.layers if one.sinks is not None)]
        linears: list[LinearWeight | SparseWeights | MixerWeights] = []
        for layer in self.layers:
            norms += layer.norms()
            every = (layer.qkv, layer.o, layer.mixer, layer.gate_up, layer.down, layer.experts)
            linears += [one for one in every if one is not None]
        if self.lm_head is not None and self.lm_head.data is not self.embedding:
            linears.append(self.lm_head)
        plain = 0 if self.score_head is None else self.score_head.nbytes
        plain += self.embedding.nbytes + sum(norm.nbytes for norm in norms)
        return plain + sum(linear.num_bytes for linear in linears)


def batch_variant_linears(weights: Weights, kernels: AnyKernels) -> tuple[str, ...]:
    """Return the names of the linears in which the bits of a row depend on its batch."""
    layer = weights.layers[0]
    attends = next((one for one in weights.layers if one.mixer is None), layer)
    mixer = next((one.mixer for one in weights.layers if one.mixer is not None), None)
    linears: dict[str, LinearWeight | None] = {
        "qkv": attends.qkv,
        "o": attends.o,
        "gate_up": layer.gate_up,
        "down": layer.down,
        "lm_head": weights.lm_head,
        "mixer_in": None if mixer is None else mixer.in_proj,
        "mixer_out": None if mixer is None else mixer.out_proj,
    }
    device = weights.embedding.device
    with torch.inference_mode():
        variant = tuple(
            name
            for name, weight in linears.items()
            if weight is not None and not _is_batch_invariant(weight, kernels, device)
        )
        sparse = next((one.experts for one in weights.layers if one.experts is not None), None)
        if sparse is not None:
            experts = {"experts.gate_up": sparse.gate_up, "experts.down": sparse.down}
            variant += tuple(
                name
                for name, grouped in experts.items()
                if not _is_grouped_batch_invariant(grouped, kernels, device)
            )
    return variant


def _is_batch_invariant(weight: LinearWeight, kernels: AnyKernels, device: torch.device) -> bool:
    x = _rows(max(_BATCH_SIZES), weight.in_features).to(device, weight.dtype)
    alone = [kernels.linear(x[row : row + 1], weight) for row in (0, 1)]
    return all(
        torch.equal(kernels.linear(x[:size], weight)[:2], torch.cat(alone)) for size in _BATCH_SIZES
    )


def _is_grouped_batch_invariant(
    weight: ExpertsWeight, kernels: AnyKernels, device: torch.device
) -> bool:
    """Test the first expert, to which all rows go."""
    x = _rows(max(_BATCH_SIZES), weight.in_features).to(device, weight.dtype)
    logits = torch.zeros(len(x), weight.num_experts, device=device)
    routing = Routing(1, renormalize=True, num_experts=weight.num_experts)

    def product(first: int, end: int) -> Tensor:
        return kernels.grouped_linear(
            x[first:end], weight, kernels.route(logits[first:end], routing)
        )

    alone = torch.cat([product(row, row + 1) for row in (0, 1)])
    return all(torch.equal(product(0, size)[:2], alone) for size in _BATCH_SIZES)


def _rows(num_rows: int, width: int) -> Tensor:
    """Return numbers [num_rows, width] float32 without a pattern that sums could hide behind."""
    return torch.arange(num_rows * width, dtype=torch.float32).square_().sin_().view(num_rows, -1)
