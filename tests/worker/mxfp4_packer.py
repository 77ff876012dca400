"""MXFP4 by the words of the OCP Microscaling specification, in numpy: packed, and what is meant.

Shapes: [..., K] numbers, B = K / 32 blocks.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_BLOCK, _LARGEST_EXPONENT = 32, 2  # of e2m1: its largest number is 1.5 * 2^2


def number_of(code: int) -> float:
    """Return what four bits mean: a sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -magnitude if sign else magnitude


def scale_of(byte: int) -> float:
    """Return what a scale means."""
    return float("nan") if byte == 255 else 2.0 ** (byte - 127)


def pack(numbers: Floats) -> tuple[Bytes, Bytes]:
    """Return blocks [..., B, 16] and scales [..., B] of the nearest numbers."""
    blocks = numbers.reshape(*numbers.shape[:-1], -1, _BLOCK)
    largest = np.maximum(np.abs(blocks).max(-1), 2.0**-100)
    exponents = np.floor(np.log2(largest)) - _LARGEST_EXPONENT
    scaled = blocks / np.exp2(exponents)[..., None]
    values = np.array([number_of(code) for code in range(16)])
    codes = np.abs(scaled[..., None] - values).argmin(-1).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def dequantized(blocks: Bytes, scales: Bytes) -> Floats:
    """Return the numbers [..., 32 B] that are meant; those over all float32 are infinite."""
    values = np.array([number_of(code) for code in range(16)], np.float32)
    factors = np.array([scale_of(byte) for byte in range(256)], np.float32)
    pairs = np.stack((values[blocks & 15], values[blocks >> 4]), axis=-1)
    with np.errstate(over="ignore"):
        numbers = pairs.reshape(*scales.shape, _BLOCK) * factors[scales][..., None]
    return numbers.reshape(*scales.shape[:-1], -1).astype(np.float32)
