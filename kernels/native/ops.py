"""The ops of a program as C sees them: mirrors of the structs in the files beside this one.

Shapes: T rows, H hidden, K inputs, N outputs, HQ / HK query and KV heads of this rank, D head_dim,
I intermediate, P pages, M positions. Activations that a linear reads are of the weights' dtype,
what it writes is float32.
"""

import ctypes


def _pointers(*names: str) -> list[tuple[str, type[ctypes.c_void_p]]]:
    return [(name, ctypes.c_void_p) for name in names]


def _counts(*names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names]


class LinearOp(ctypes.Structure):
    """`struct linear`: y [T, N] float32 = x [T, K] times packed weights, plus bias [N] float32.

    The fields from `tables` to `max_outliers` are those of an `ExponentCode`; else null and 0.
    """

    _fields_ = [
        *_pointers("x", "weight", "bias", "y", "tables", "outliers", "num_outliers"),
        *_counts("max_outliers", "x_stride", "y_stride", "num_inputs", "num_outputs", "is_bf16"),
    ]


class CodingOp(ctypes.Structure):
    """`struct coding`: plain panels to coded ones; a row of the step is a panel."""

    _fields_ = [
        *_pointers("panels", "coded", "tables", "outliers", "num_outliers"),
        *_counts("num_steps", "max_outliers"),
    ]


class NormOp(ctypes.Structure):
    """`struct add_rms_norm`: total = x + residual, all [T, H] float32; out = its norm.

    `residual` may be null, and may be `total`.
    """

    _fields_ = [
        *_pointers("x", "residual", "weight", "total", "out"),
        *_counts("width", "is_bf16"),
        ("eps", ctypes.c_double),
    ]


class RopeOp(ctypes.Structure):
    """`struct rope_and_write`: qkv [T, HQ + 2 HK, D] float32 to q [T, HQ, D] and to the pages."""

    _fields_ = [
        *_pointers("qkv", "cos", "sin", "q_norm", "k_norm", "k_pages", "v_pages", "q"),
        *_counts("num_heads", "num_kv_heads", "head_dim", "page_size", "is_bf16"),
        ("eps", ctypes.c_double),
    ]


class GateOp(ctypes.Structure):
    """`struct silu_and_mul`: gate_up [T, 2I] float32 to out [T, I]."""

    _fields_ = [*_pointers("gate_up", "out"), *_counts("width", "is_bf16")]


class AttentionOp(ctypes.Structure):
    """`struct attention`: q [T, HQ, D], its rows q_stride elements apart, to out [T, HQ, D]."""

    _fields_ = [
        *_pointers("q", "k_pages", "v_pages", "out"),
        *_counts("q_stride", "num_heads", "num_kv_heads", "head_dim", "page_size", "is_bf16"),
        ("scale", ctypes.c_double),
    ]


class RankSumOp(ctypes.Structure):
    """`struct rank_sum`: x [T, width] float32 becomes the sum over the ranks of an exchange."""

    _fields_ = [*_pointers("exchange", "x"), *_counts("width")]


class LoraOp(ctypes.Structure):
    """`struct lora`, of two ops: y [T, N] float32 = gain y + shift + B (A x), by each row's slot.

    `table` [slots, fields] int64 is what worker.lora.pointer_table keeps: address of A [R, K],
    R, addresses of gain [N] and shift [N] float32 or 0; then for each module of the fused linear,
    whose outputs stand side by side and are `module_widths` [num_modules] int64 wide, the address
    of B transposed [ranks, width], its first lora_rank and its number of lora_ranks. A and B are
    bfloat16 or float32, as `is_lora_bf16` says of all slots, and start at any element.

    lora_shrink writes A x to `inner` [T, inner_stride] float32, where lora_expand reads it; no slot
    has an R above inner_stride.
    """

    _fields_ = [
        *_pointers("x", "y", "table", "module_widths"),
        *_counts("x_stride", "y_stride", "num_inputs", "num_modules"),
        *_counts("is_bf16", "is_lora_bf16"),
        *_pointers("inner"),
        *_counts("inner_stride"),
    ]


class ArgmaxOp(ctypes.Structure):
    """`struct argmax`: the largest of each row of x [T, N] float32 and its id [T] int64."""

    _fields_ = [*_pointers("x", "values", "ids"), *_counts("width")]


class TakeOp(ctypes.Structure):
    """`struct take_rows`: the step's samples of x [T, H] float32 to out [S, H]."""

    _fields_ = [*_pointers("x", "out"), *_counts("width")]
