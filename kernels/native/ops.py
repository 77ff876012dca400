"""The ops of a program as C sees them: mirrors of the structs in the files beside this one.

Shapes: T rows, H hidden, K inputs, N outputs, HQ / HK query and KV heads of this rank, D head_dim,
I intermediate, P pages, M positions, k experts of a row, E of this rank; those of recurrent layers
are `kernels.recurrent.interface`'s. Activations that a linear
reads are of the weights' dtype, what it writes is float32.
"""

import ctypes

import torch
from torch import Tensor

from kernels.linear import LinearWeight


def _pointers(*names: str) -> list[tuple[str, type[ctypes.c_void_p]]]:
    return [(name, ctypes.c_void_p) for name in names]


def _counts(*names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names]


def lora_item(dtype: torch.dtype) -> int:
    """Return what csrc/lora/lora.h calls a dtype of A and B."""
    return {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}[dtype]


class LoraOp(ctypes.Structure):
    """`struct lora`, of two ops: y [T, N] float32 = gain y + shift + B (A x), by each row's slot.

    `table` [slots, fields] int64 is what worker.lora.pointer_table keeps: address of A [R, K],
    R, addresses of gain [N], shift [N] and scales [R], float32 or 0; then for each module of the
    fused linear, whose outputs stand side by side and are `module_widths` [num_modules] int64 wide,
    the address of B transposed [ranks, width], its first lora_rank and its number of lora_ranks.
    In int8, A and B are as `kernels.lora.WriteCodes` writes them.
    A and B of all slots are what `item` says (`lora_item`), and start at any element.

    lora_shrink writes A x to `inner` [T, inner_stride] float32, where lora_expand reads it; no slot
    has an R above inner_stride. `coded` [T, as many bytes as the library says] is memory for rows
    in int8, or null; `codes_for_linear` tells whether the linear of the same x finds its own there.
    """

    _fields_ = [
        *_pointers("x", "y", "table", "module_widths"),
        *_counts("x_stride", "y_stride", "num_inputs", "num_modules"),
        *_counts("is_bf16", "item"),
        *_pointers("inner"),
        *_counts("inner_stride"),
        *_pointers("coded"),
        *_counts("codes_for_linear"),
    ]


class LinearDeltaOp(ctypes.Structure):
    """`struct linear_delta`: a LoRA in int8 that a linear adds to its outputs.

    `inner` [T, as many bytes as the library says] is memory for A x in int8. Without a LoRA all of
    its fields are 0.
    """

    _fields_ = [("lora", LoraOp), *_pointers("inner")]


class LinearOp(ctypes.Structure):
    """`struct linear`: y [T, N] float32 = x [T, K] times packed weights, plus bias [N] float32.

    The fields from `tables` to `max_outliers` are those of an `ExponentCode`; else null and 0.
    """

    _fields_ = [
        *_pointers("x", "weight", "bias", "y", "tables", "outliers", "num_outliers"),
        *_counts("max_outliers", "x_stride", "y_stride", "num_inputs", "num_outputs", "is_bf16"),
        ("delta", LinearDeltaOp),
    ]


def linear_op(
    x: Tensor, weight: LinearWeight, y: Tensor
) -> tuple[LinearOp, tuple[Tensor | None, ...]]:
    """Return the op of a product, and the tensors that it points into."""
    assert x.dtype == weight.dtype, f"{x.dtype} rows for {weight.dtype} weights"
    assert x.stride(1) == 1, "the inputs of a row must be contiguous"
    assert weight.layout == "panels", f"{weight.layout} is for torch"
    code: tuple[Tensor | None, ...] = (None, None, None)
    if weight.code is not None:
        code = weight.code.tables, weight.code.outliers, weight.code.num_outliers
    tensors = x, weight.data, weight.bias, y, *code
    op = LinearOp(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        0 if weight.code is None else weight.code.outliers.shape[1],
        x.stride(0),
        y.stride(0),
        weight.in_features,
        weight.out_features,
        x.dtype == torch.bfloat16,
    )
    return op, tensors


class QuantizedLinearOp(ctypes.Structure):
    """`struct quantized_linear`: the same of int8 panels with `scales` [N], or of int4 panels.

    `coded` [T, as many bytes as the library says] is memory for rows in int8.
    """

    _fields_ = [
        *_pointers("x", "weight", "scales", "bias", "y", "largest", "coded"),
        *_counts("num_ranks", "x_stride", "y_stride", "num_inputs", "num_outputs", "is_bf16"),
        *_counts("is_rotated"),
        ("delta", LinearDeltaOp),
    ]


def quantized_linear_op(
    x: Tensor, weight: LinearWeight, y: Tensor, largest: Tensor | None = None
) -> tuple[QuantizedLinearOp, tuple[Tensor | None, ...]]:
    """Return what `linear_op` does, of a quantized weight; `coded` is still to be set.

    With `largest` [T, ranks] float32, what all ranks have found in a row, y is int32 sums.
    """
    assert x.dtype == weight.dtype, f"{x.dtype} rows for a weight of {weight.dtype} rows"
    assert x.stride(1) == 1, "the inputs of a row must be contiguous"
    assert weight.is_quantized, f"{weight.layout} are not quantized"
    tensors = x, weight.data, weight.scales, weight.bias, y, largest
    op = QuantizedLinearOp(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        None,
        0 if largest is None else largest.shape[1],
        x.stride(0),
        y.stride(0),
        weight.in_features,
        weight.out_features,
        x.dtype == torch.bfloat16,
        weight.is_rotated,
    )
    return op, tensors


class QuantizeGroupsOp(ctypes.Structure):
    """`struct quantize_groups`: weight [N, K] to int4; a row of the step is an output."""

    _fields_ = [
        *_pointers("weight", "codes", "scales", "offsets"),
        *_counts("stride", "num_inputs", "is_bf16", "is_coded"),
    ]


class RowLargestOp(ctypes.Structure):
    """`struct row_largest`: the largest sizes of x [T, K] to a rank's column of out [T, ranks]."""

    _fields_ = [
        *_pointers("x", "out"),
        *_counts("x_stride", "num_inputs", "is_bf16", "is_rotated", "rank", "num_ranks"),
    ]


MOST_PIECES = 2  # of a spread


class ScaleSumsOp(ctypes.Structure):
    """`struct scale_sums`: sums [T, N] int32 to y [T, N] float32; `starts` only of experts."""

    _fields_ = [
        *_pointers("sums", "largest", "scales", "bias", "starts", "y"),
        *_counts("num_ranks", "width", "padded_outputs", "num_experts"),
    ]


class SpreadOp(ctypes.Structure):
    """`struct spread`: pieces of rows of x to their places in rows of out; counts are in bytes."""

    _fields_ = [
        *_pointers("x", "out"),
        *_counts("x_stride", "out_size"),
        *_counts(*(f"{name}{i}" for name in ("from", "size", "to") for i in range(MOST_PIECES))),
    ]


class CodingOp(ctypes.Structure):
    """`struct coding`: plain panels to coded ones; a row of the step is a panel."""

    _fields_ = [
        *_pointers("panels", "coded", "tables", "outliers", "num_outliers"),
        *_counts("num_steps", "max_outliers"),
    ]


class NormOp(ctypes.Structure):
    """`struct add_rms_norm`: total = x + residual, all [T, H] float32; out = its norm.

    `residual` may be null, and may be `total`. Without a `weight` out is the sum; without a `total`
    there is no residual.
    """

    _fields_ = [
        *_pointers("x", "residual", "weight", "total", "out"),
        *_counts("width", "is_bf16", "is_weight_bf16"),
        ("eps", ctypes.c_double),
    ]


class RopeOp(ctypes.Structure):
    """`struct rope_and_write`: qkv [T, HQ + 2 HK, D] float32 to q [T, HQ, D] and to the pages.

    The rows of qkv are qkv_stride numbers apart. Pages are of q's dtype, or `is_int8`.
    """

    _fields_ = [
        *_pointers("qkv", "cos", "sin", "q_norm", "k_norm", "k_pages", "v_pages", "q"),
        *_counts("qkv_stride"),
        *_counts("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "page_size"),
        *_counts("is_bf16", "is_norm_bf16", "is_int8"),
        ("eps", ctypes.c_double),
    ]


class WideNormOp(ctypes.Structure):
    """`struct wide_norm`, of two ops on qkv [T, HQ + 2 HK, D] float32.

    square_sums writes the squares of this rank's Q and K to `sums` [T, 2] float32, wide_norm reads
    there those of all ranks and norms Q and K in place.
    """

    _fields_ = [
        *_pointers("qkv", "sums", "q_norm", "k_norm"),
        *_counts("stride", "num_heads", "num_kv_heads", "head_dim", "counts_kv"),
        *_counts("q_width", "k_width", "is_norm_bf16"),
        ("eps", ctypes.c_double),
    ]


class GateOp(ctypes.Structure):
    """`struct gate`: gate_up [T, 2I] float32 to out [T, I]; the last two of swigluoai_and_mul."""

    _fields_ = [
        *_pointers("gate_up", "out"),
        *_counts("stride", "width", "is_bf16"),
        ("alpha", ctypes.c_double),
        ("limit", ctypes.c_double),
    ]


class GateHeadsOp(ctypes.Structure):
    """`struct gate_heads`: x [T, I] changed in place by gates [T, I] float32.

    The rows of gates are gates_stride numbers apart.
    """

    _fields_ = [*_pointers("x", "gates"), *_counts("gates_stride", "width", "is_bf16")]


class AttentionOp(ctypes.Structure):
    """`struct attention`: q [T, HQ, D], its rows q_stride elements apart, to out [T, HQ, D].

    Pages are of q's dtype, or `is_int8`. `sinks` [HQ] float32 may be null.
    """

    _fields_ = [
        *_pointers("q", "k_pages", "v_pages", "out"),
        *_counts("q_stride", "num_heads", "num_kv_heads", "head_dim", "page_size", "is_bf16"),
        *_counts("window", "is_int8"),
        ("scale", ctypes.c_double),
        *_pointers("sinks"),
    ]


class RankSumOp(ctypes.Structure):
    """`struct rank_sum`: x [T, width] becomes the sum over the ranks of an exchange.

    `number` says what of, as `number_of` has it: float32 or int32.
    """

    _fields_ = [*_pointers("exchange", "x"), *_counts("width", "number")]


def number_of(dtype: torch.dtype) -> int:
    """Return what csrc/distributed/shared_memory.c calls a dtype that ranks add up."""
    return {torch.float32: 0, torch.bfloat16: 1, torch.int32: 2}[dtype]


class ArgmaxOp(ctypes.Structure):
    """`struct argmax`: the largest of each row of x [T, N] float32 and its id [T] int64."""

    _fields_ = [*_pointers("x", "values", "ids"), *_counts("stride", "width")]


class TakeOp(ctypes.Structure):
    """`struct take_rows`: the step's samples of x [T, H] float32 to out [S, H]."""

    _fields_ = [*_pointers("x", "out"), *_counts("width")]


class RouteOp(ctypes.Structure):
    """`struct route`: logits [T, num_logits] float32, strided, to experts and weights [T, k]."""

    _fields_ = [
        *_pointers("logits", "experts", "weights"),
        *_counts("num_logits", "stride", "top_k", "is_renormalized"),
    ]


class SortPairsOp(ctypes.Structure):
    """`struct sort_pairs`: experts [T, k] int64 to what `RoutedRows` says of pairs, in int64."""

    _fields_ = [
        *_pointers("experts", "positions", "rows", "starts"),
        *_counts("top_k", "num_experts", "first_expert"),
    ]


class PermuteOp(ctypes.Structure):
    """`struct permute`: x [T, K], rows x_size bytes apart, to out [T k, K] of row_size bytes."""

    _fields_ = [*_pointers("x", "rows", "end", "out"), *_counts("x_size", "row_size")]


class UnpermuteOp(ctypes.Structure):
    """`struct unpermute`: y [T k, N], start [T, N] and gates [T] to out [T, N], all float32."""

    _fields_ = [
        *_pointers("y", "weights", "positions", "end", "start", "gates", "out"),
        *_counts("top_k", "width", "gate_stride"),
    ]


class GatedLinearOp(ctypes.Structure):
    """`struct gated_linear`: a linear op of gates and ups; what is made of both is out [T, I]."""

    _fields_ = [("linear", LinearOp), *_pointers("out"), *_counts("is_gelu")]


class GatedQuantizedLinearOp(ctypes.Structure):
    """`struct gated_quantized_linear`: likewise."""

    _fields_ = [("linear", QuantizedLinearOp), *_pointers("out"), *_counts("is_gelu")]


class GroupedLinearOp(ctypes.Structure):
    """`struct grouped_linear`: a linear op on rows [T k, K] that stand by expert."""

    _fields_ = [("linear", LinearOp), *_pointers("starts"), *_counts("num_experts")]


class GroupedQuantizedLinearOp(ctypes.Structure):
    """`struct grouped_quantized_linear`: likewise."""

    _fields_ = [("linear", QuantizedLinearOp), *_pointers("starts"), *_counts("num_experts")]


class PairRunsOp(ctypes.Structure):
    """`struct pair_runs`: the step's runs to runs [T k, 3] int64 of pairs, and their number."""

    _fields_ = [*_pointers("rows", "starts", "runs", "num_runs"), *_counts("num_experts")]


class GroupedLoraOp(ctypes.Structure):
    """`struct grouped_lora`, of two ops: a LoRA op on pairs, whose table is [slots, E, fields]."""

    _fields_ = [("lora", LoraOp), *_pointers("runs", "num_runs")]


class CausalConvOp(ctypes.Structure):
    """`struct causal_conv`: x [T, C] float32, or b, c and x [T, 3C] with gates, to out [T, C]."""

    _fields_ = [
        *_pointers("x", "taps", "bias", "states", "out"),
        *_counts("x_stride", "page_stride", "num_channels", "num_taps"),
        *_counts("has_gates", "has_silu", "is_bf16"),
    ]


class SelectiveScanOp(ctypes.Structure):
    """`struct selective_scan`: xbc [T, H D + 2 G N] and dt [T, H] to out [T, H D], all float32."""

    _fields_ = [
        *_pointers("xbc", "dt", "a", "dt_bias", "d", "states", "out"),
        *_counts("xbc_stride", "dt_stride", "page_stride"),
        *_counts("num_heads", "num_groups", "state_size", "head_dim"),
        ("dt_min", ctypes.c_double),
        ("dt_max", ctypes.c_double),
    ]


class GatedDeltaRuleOp(ctypes.Structure):
    """`struct gated_delta_rule`: qkv, a and b to out [T, HV DV], all float32."""

    _fields_ = [
        *_pointers("qkv", "a", "b", "decay", "dt_bias", "states", "out"),
        *_counts("qkv_stride", "a_stride", "b_stride", "page_stride"),
        *_counts("num_key_heads", "num_heads", "key_dim", "value_dim"),
    ]


class GatedNormOp(ctypes.Structure):
    """`struct gated_norm`, of two ops on x and gate [T, W] float32.

    gated_norm writes out [T, W], in groups of features; gated_squares a row's squares to `sums`
    [T, 1] float32, where gated_norm reads those of all ranks, unless it is null.
    """

    _fields_ = [
        *_pointers("x", "gate", "sums", "weight", "out"),
        *_counts("gate_stride", "width", "group_size", "all_width"),
        *_counts("is_gate_first", "is_weight_bf16", "is_bf16"),
        ("eps", ctypes.c_double),
    ]
