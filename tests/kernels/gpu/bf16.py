"""Makes Triton's interpreter compute in bfloat16.

It keeps bfloat16 as bit patterns in uint16 and, in every release up to 3.9, adds and multiplies
those (triton-lang/triton#11585); its own casts cut off what should be rounded. Here the operations
that kernels use widen to float32, and round to nearest even once. Reductions are not covered: a
kernel casts to float32 before it reduces.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter

Array = npt.NDArray[Any]
Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
NAN = np.uint16(0x7FC0)


def widen(bits: Array) -> Array:
    """Return bfloat16 bits as float32."""
    wide: Array = np.ascontiguousarray(bits).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(np.shape(bits))


def narrow(values: Array) -> Array:
    """Return float32 as bfloat16 bits, rounded to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    narrowed: Array = np.where(np.isnan(values), NAN, rounded.astype(np.uint16))
    return narrowed.reshape(np.shape(values))


def is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def as_float32(handle: Any) -> Any:
    return Handle(widen(handle.data), tl.float32) if is_bf16(handle) else handle


_binary_op, _unary_op = Builder.binary_op, Builder.unary_op
_create_dot, _cast_impl = Builder.create_dot, Builder.cast_impl
_create_fp_to_fp, _create_fma = Builder.create_fp_to_fp, Builder.create_fma


def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    if not (is_bf16(left) and is_bf16(right)) or op in BITWISE:
        return _binary_op(self, left, right, op)
    result = op(widen(left.data), widen(right.data))
    return Handle(result if result.dtype == bool else narrow(result), tl.bfloat16)


def unary_op(self: Any, value: Any, op: Any) -> Any:
    if not is_bf16(value):
        return _unary_op(self, value, op)
    return Handle(narrow(op(widen(value.data))), tl.bfloat16)


def create_dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    return _create_dot(self, as_float32(a), as_float32(b), total, *options)


def create_chained_dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """Sum products in the order of the inner axis, for every row alike, as tensor cores do.

    The interpreter's own product is BLAS's, where a row's place in a tile changes the order.
    """
    left = as_float32(a).data.astype(np.float32)
    right = as_float32(b).data.astype(np.float32)
    result = total.data.astype(np.float32)
    for column, row in zip(left.T, right, strict=True):
        result += column[:, None] * row
    return Handle(result, total.dtype.scalar)


def cast_impl(self: Any, value: Any, target: Any) -> Any:
    source, wanted = value.dtype.scalar, target.scalar
    if source == wanted:
        return Handle(value.data, wanted)
    value = as_float32(value)
    if wanted == tl.float32 and value.dtype.scalar == tl.float32:
        return Handle(value.data, wanted)
    if wanted == tl.bfloat16:
        return Handle(narrow(value.data.astype(np.float32)), wanted)
    return Handle(value.data.astype(interpreter._get_np_dtype(wanted)), wanted)


def create_fp_to_fp(self: Any, value: Any, target: Any, rounding: Any) -> Any:
    types = (value.dtype.scalar, target.scalar)
    is_8bit = any(one.primitive_bitwidth == 8 for one in types)
    if tl.bfloat16 in types and not is_8bit:
        return cast_impl(self, value, target)
    return _create_fp_to_fp(self, value, target, rounding)


def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    if not is_bf16(z):
        return _create_fma(self, x, y, z)
    return Handle(narrow(widen(x.data) * widen(y.data) + widen(z.data)), tl.bfloat16)


def install() -> None:
    """Put the operations above in place of the interpreter's, for the life of the process."""
    for function in (binary_op, unary_op, create_dot, cast_impl, create_fp_to_fp, create_fma):
        setattr(Builder, function.__name__, function)
