"""Vectors as they are sent: numbers of a type and a byte order, as JSON, base64 or plain bytes.

The types and the header of plain bytes are vLLM's.
"""

import base64
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.responses import Response

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
BYTES = "application/octet-stream"
_ORDERS = {"native": "=", "big": ">", "little": "<"}
# Bits of the mantissa, the bias of the exponent, and how many codes are numbers, by type.
_FP8 = {"fp8_e4m3": (3, 7, 127), "fp8_e5m2": (2, 15, 124)}

Values = npt.NDArray[np.float32]


def as_bytes(values: Values, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """Return numbers [D] as bytes: rounded to the nearest of their type, ties to even.

    What is over the greatest number of 8 bits becomes that.
    """
    order = _ORDERS[endianness]
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        upper = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return upper.astype(f"{order}u2").tobytes()
    if dtype in _FP8:
        return _fp8_codes(values, dtype).tobytes()
    return values.astype(f"{order}f{4 if dtype == 'float32' else 2}").tobytes()


@cache
def _fp8_numbers(dtype: str) -> npt.NDArray[np.float64]:
    """Return the number of each code that has no sign, in ascending order."""
    mantissa_bits, bias, count = _FP8[dtype]
    codes = np.arange(count)
    exponents, mantissas = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fractions = mantissas / (1 << mantissa_bits) + (exponents > 0)
    return np.asarray(fractions * 2.0 ** (np.maximum(exponents, 1) - bias))


def _fp8_codes(values: Values, dtype: str) -> npt.NDArray[np.uint8]:
    numbers, sizes = _fp8_numbers(dtype), np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(numbers, sizes), 1, len(numbers) - 1)
    down, up = sizes - numbers[above - 1], numbers[above] - sizes
    is_up = (up < down) | ((up == down) & (above % 2 == 0))
    codes = np.where(is_up, above, above - 1)
    return np.asarray(codes + 128 * np.signbit(values), np.uint8)


def as_json(
    values: Values, encoding: str, dtype: EmbedDtype, endianness: Endianness
) -> msgspec.Raw:
    """Return numbers [D] as a list, or in base64."""
    if encoding == "base64":
        coded = base64.b64encode(as_bytes(values, dtype, endianness))
        return msgspec.Raw(b'"' + coded + b'"')
    return msgspec.Raw(msgspec.json.encode(values.tolist()))


def bytes_response(
    vectors: Sequence[Values],
    dtype: EmbedDtype,
    endianness: Endianness,
    metadata: dict[str, Any] | None,
) -> Response:
    """Return vectors one behind the other, with what is said of each of them in a header.

    `metadata` is what is said of all; None: nothing is said.
    """
    parts = [as_bytes(values, dtype, endianness) for values in vectors]
    headers = {}
    if metadata is not None:
        items, start = [], 0
        for index, (values, part) in enumerate(zip(vectors, parts, strict=True)):
            items.append(
                {
                    "index": index,
                    "embed_dtype": dtype,
                    "endianness": endianness,
                    "start": start,
                    "end": start + len(part),
                    "shape": values.shape,
                }
            )
            start += len(part)
        headers["metadata"] = msgspec.json.encode(metadata | {"data": items}).decode()
    return Response(b"".join(parts), headers=headers, media_type=BYTES)
