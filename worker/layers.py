"""One decoder layer of the Llama family on one rank.

Owns the order of the operations and the two places of a layer where ranks sum. Everything a call
needs comes as an argument. Knows nothing of plans, sequences or sampling.

Shapes: T rows, H hidden, HQ / HK query and KV heads of this rank, D head_dim, I MLP features of
this rank, M positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, paged_attention, write_kv
from kernels.elementwise import add_rms_norm, apply_rope, rms_norm, silu_and_mul
from kernels.linear import LinearWeight, linear
from kernels.lora import lora_apply
from worker.adapter_bank import DOWN, GATE_UP, OUT, QKV, LayerSegments
from worker.parallel import Communicator
from worker.weights import LayerWeights


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

    attention: AttentionBatch
    k_pages: Tensor  # [P, HK, page, D]
    v_pages: Tensor  # [P, HK, page, D]
    segments: LayerSegments | None  # None: no row has an adapter


class DecoderLayer:
    """Attention and MLP of one layer."""

    def __init__(self, shape: LayerShape, weights: LayerWeights, group: Communicator) -> None:
        self._shape = shape
        self._weights = weights
        self._group = group

    def forward(
        self, x_TH: Tensor, residual_TH: Tensor | None, context: LayerContext
    ) -> tuple[Tensor, Tensor]:
        """Return (output, residual) whose sum is the layer's output; `None` before the first.

        The residual is float32, whatever the type of the weights.
        """
        weights, eps = self._weights, self._shape.rms_norm_eps
        if residual_TH is None:
            residual_TH, x_TH = x_TH.float(), rms_norm(x_TH, weights.input_norm, eps)
        else:
            x_TH, residual_TH = add_rms_norm(x_TH, residual_TH, weights.input_norm, eps)
        x_TH = self._attend(x_TH, context)
        x_TH, residual_TH = add_rms_norm(x_TH, residual_TH, weights.mlp_norm, eps)
        gate_up_TI2 = _linear(x_TH, weights.gate_up, context.segments, GATE_UP)
        x_TI = silu_and_mul(gate_up_TI2)
        x_TH = self._group.all_reduce(_linear(x_TI, weights.down, context.segments, DOWN))
        return x_TH, residual_TH

    def _attend(self, x_TH: Tensor, context: LayerContext) -> Tensor:
        shape, weights = self._shape, self._weights
        qkv = _linear(x_TH, weights.qkv, context.segments, QKV)
        heads = qkv.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        q_TQD, k_TKD, v_TKD = torch.split(
            heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        if weights.q_norm is not None and weights.k_norm is not None:
            q_TQD = rms_norm(q_TQD, weights.q_norm, shape.rms_norm_eps)
            k_TKD = rms_norm(k_TKD, weights.k_norm, shape.rms_norm_eps)
        q_TQD, k_TKD = apply_rope(q_TQD, k_TKD, shape.cos, shape.sin, context.attention.positions)
        write_kv(k_TKD, v_TKD, context.k_pages, context.v_pages, context.attention.kv_loc)
        out_TQD = paged_attention(
            q_TQD, context.k_pages, context.v_pages, context.attention, shape.head_dim**-0.5
        )
        # The LoRA delta is added to this rank's part of the sum, so one all-reduce serves both.
        return self._group.all_reduce(_linear(out_TQD.flatten(1), weights.o, context.segments, OUT))


def _linear(
    x: Tensor, weight: LinearWeight, segments: LayerSegments | None, fused_linear: int
) -> Tensor:
    """Return the linear's output with each row's own LoRA added."""
    y = linear(x, weight)
    if segments is not None:
        lora_apply(y, x, segments[fused_linear])
    return y
