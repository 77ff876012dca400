"""One decoder layer on one rank, as a `ModelConfig` has it: attention or a mixer, and a gated MLP.

Owns the order of the operations, the norms before and behind blocks, and the two all-reduces of a
layer. Keeps no state between two calls: pages, adapters and the group are arguments.

Shapes: T rows, H hidden, HQ / HK query and KV heads of this rank, D head_dim, R features of a head
that rotate, I MLP features of this rank, P pages, M positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from kernels.quantized import Piece
from worker.distributed.communicator import Communicator
from worker.distributed.row_parallel import gathered, row_parallel_part, summed
from worker.lora.adapter_weights import DOWN, GATE_UP, MIXER_IN, MIXER_OUT, OUT, QKV
from worker.mixers.mixer import Mixer, MixerContext
from worker.model_config import Activation
from worker.models.experts import SparseMlp
from worker.weights.model_weights import LayerWeights


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the layers of one kind have in common on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    norm_eps: float  # of the norms of the residual
    block_norm_eps: float  # of those inside of blocks and behind them
    cos: Tensor  # [M, R/2] float32
    sin: Tensor  # [M, R/2] float32
    activation: Activation
    # Where Q and K are normed over all heads: features of either over all ranks.
    wide_norm: tuple[int, int] | None
    counts_kv: bool  # whether this rank's K counts in that norm
    # Where this rank's Q and K stand among those of all, if the norm's sums must be exact.
    qk_places: tuple[int, int] | None = None
    has_gate: bool = False  # of what attention returns
    window: int | None = None  # positions that a row sees; None: all


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The arguments of one call of one layer besides the hidden states."""

    rows: Any  # where they lie in what attention or a mixer keeps, as the kernels want it
    kept: Sequence[Tensor]  # K and V [P, HK, page, D], or the states of a mixer
    loras: Sequence[Any] | None  # by product, likewise; None: no row has an adapter
    group: Communicator


class DecoderLayer:
    """Attention, or a mixer, and MLP of one layer, or experts beside an MLP or in place of it."""

    def __init__(
        self,
        shape: LayerShape,
        weights: LayerWeights,
        kernels: AnyKernels,
        experts: SparseMlp | None = None,
        mixer: Mixer | None = None,
    ) -> None:
        self._experts = experts
        self._mixer = mixer
        self._shape = shape
        self._weights = weights
        self._kernels = kernels

    def forward(
        self, x_TH: Tensor, residual_TH: Tensor | None, context: LayerContext
    ) -> tuple[Tensor, Tensor]:
        """Return (output, residual) whose sum is the layer's output; `None` before the first.

        The residual is float32, whatever the type of the weights.
        """
        weights, kernels, eps = self._weights, self._kernels, self._shape.norm_eps
        dtype = weights.dtype
        x_TH, residual_TH = kernels.add_rms_norm(x_TH, residual_TH, weights.input_norm, eps, dtype)
        x_TH = self._normed(self._mix(x_TH, context), weights.after_attention_norm)
        x_TH, residual_TH = kernels.add_rms_norm(x_TH, residual_TH, weights.mlp_norm, eps, dtype)
        x_TH = self._mlp(x_TH, context)
        return self._normed(x_TH, weights.after_mlp_norm), residual_TH

    def _mix(self, x_TH: Tensor, context: LayerContext) -> Tensor:
        """Return what other positions bring to each row: by attention, or by a mixer's states."""
        if self._mixer is None:
            return self._attend(x_TH, context)
        lora_in, lora_out = None, None
        if context.loras is not None:
            lora_in, lora_out = context.loras[MIXER_IN], context.loras[MIXER_OUT]
        return self._mixer.forward(
            x_TH, MixerContext(context.rows, context.kept, lora_in, lora_out, context.group)
        )

    def _mlp(self, x_TH: Tensor, context: LayerContext) -> Tensor:
        gate_up, down, y_TH = self._weights.gate_up, self._weights.down, None
        if gate_up is not None and down is not None:
            lora, gated = self._lora(context, GATE_UP), self._kernels.gated_linear
            activation = self._shape.activation
            y_TH = self._partial(gated(x_TH, gate_up, activation, lora), down, context, DOWN)
        if self._experts is not None:
            return self._experts.forward(x_TH, context.loras, context.group, y_TH)
        assert down is not None and y_TH is not None, "a layer has an MLP, experts or both"
        return summed(y_TH, down, context.group)

    def _normed(self, x_TH: Tensor, norm: Tensor | None) -> Tensor:
        """Return the output of a block as it joins the residual."""
        if norm is None:
            return x_TH
        return self._kernels.rms_norm(x_TH, norm, self._shape.block_norm_eps)

    def _attend(self, x_TH: Tensor, context: LayerContext) -> Tensor:
        shape, weights, kernels = self._shape, self._weights, self._kernels
        k_pages, v_pages = context.kept
        assert weights.qkv is not None and weights.o is not None, "a layer that attends"
        qkv = kernels.linear(x_TH, weights.qkv, self._lora(context, QKV))
        gates_TQ = None
        if shape.has_gate:  # they come before Q
            gates_TQ, qkv = qkv.tensor_split([shape.num_heads * shape.head_dim], dim=1)
        qkv = qkv.view(len(qkv), -1, shape.head_dim)
        if shape.wide_norm is not None:
            self._norm_all_heads(qkv, shape.wide_norm, context.group)
        has_head_norms = shape.wide_norm is None
        q_TQD = kernels.rope_and_write(
            qkv,
            shape.num_heads,
            shape.cos,
            shape.sin,
            context.rows,
            k_pages,
            v_pages,
            weights.q_norm if has_head_norms else None,
            weights.k_norm if has_head_norms else None,
            shape.block_norm_eps,
            weights.o.dtype,
        )
        out_TQD = kernels.paged_attention(
            q_TQD,
            k_pages,
            v_pages,
            context.rows,
            shape.attention_scale,
            shape.window,
            weights.sinks,
        )
        if gates_TQ is not None:
            kernels.gate_heads(out_TQD, gates_TQ)
        y_TH = self._partial(out_TQD.flatten(1), weights.o, context, OUT)
        return summed(y_TH, weights.o, context.group)

    def _norm_all_heads(self, qkv: Tensor, widths: tuple[int, int], group: Communicator) -> None:
        """Norm Q and K in place, each over its heads on all ranks."""
        shape, weights, kernels = self._shape, self._weights, self._kernels
        assert weights.q_norm is not None and weights.k_norm is not None, "norms of Q and K"
        if shape.qk_places is None:
            heads = shape.num_heads, shape.num_kv_heads
            sums = group.all_reduce(kernels.square_sums(qkv, *heads, counts_kv=shape.counts_kv))
        else:
            sums = self._exact_square_sums(qkv, widths, shape.qk_places, group)
        kernels.wide_norm(qkv, sums, weights.q_norm, weights.k_norm, widths, shape.block_norm_eps)

    def _exact_square_sums(
        self, qkv: Tensor, widths: tuple[int, int], places: tuple[int, int], group: Communicator
    ) -> Tensor:
        """Return what ranks' squares add up to [T, 2], each with all heads of Q and K."""
        shape, dim = self._shape, self._shape.head_dim
        own_q, own_k = shape.num_heads * dim, shape.num_kv_heads * dim * shape.counts_kv
        pieces = [Piece(0, own_q, places[0]), Piece(own_q, own_k, widths[0] + places[1])]
        whole = widths[0] + 2 * widths[1]  # V is left away, and its place is not
        rows = gathered(self._kernels, qkv.flatten(1), pieces, whole, group, "all heads")
        heads = rows.view(len(rows), whole // dim, dim)
        return self._kernels.square_sums(heads, widths[0] // dim, widths[1] // dim, counts_kv=True)

    def _lora(self, context: LayerContext, fused_linear: int) -> Any | None:
        """Return what adds each row's own LoRA to a linear's output."""
        return None if context.loras is None else context.loras[fused_linear]

    def _partial(
        self, x: Tensor, weight: LinearWeight, context: LayerContext, fused_linear: int
    ) -> Tensor:
        """Return this rank's part of a linear whose inputs ranks share, LoRA with it."""
        lora = self._lora(context, fused_linear)
        return row_parallel_part(self._kernels, x, weight, lora, context.group)
