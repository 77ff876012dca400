"""One decoder layer of the Llama family on one rank.

Owns the order of the operations and the two places of a layer where ranks sum. Everything a call
needs comes as an argument. Knows nothing of plans, sequences or sampling.

Shapes: T rows, H hidden, HQ / HK query and KV heads of this rank, D head_dim, I MLP features of
this rank, M positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.dispatch import AnyKernels
from kernels.linear import LinearWeight
from worker.distributed.parallel import Communicator
from worker.lora.adapter_weights import DOWN, GATE_UP, OUT, QKV
from worker.weights.model_weights import LayerWeights


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
    """What one call of one layer works on besides the hidden states."""

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
