"""MXFP4 of the OCP Microscaling formats (version 1.0): 32 numbers of 4 bits that share a scale.

A number is e2m1: a sign, two bits of exponent and one of mantissa. A scale is e8m0: a power of two
by its exponent and 127, where 255 is no number. Two numbers are a byte, the first in its low half.

Shapes: N outputs, B blocks of an output.
"""

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALES = (*(2.0 ** (byte - 127) for byte in range(255)), float("nan"))


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return what is meant, which bfloat16 holds as well, as [N, 32 B] float32.

    Args:
        blocks: [N, B, 16] uint8.
        scales: [N, B] uint8.
    """
    num_outputs, num_blocks, _ = blocks.shape
    pairs = _numbers_of_bytes().index_select(0, blocks.flatten().int())
    factors = torch.tensor(_SCALES).index_select(0, scales.flatten().int())
    numbers = pairs.view(num_outputs, num_blocks, -1).mul_(factors.view(num_outputs, -1, 1))
    return numbers.view(num_outputs, -1)


def _numbers_of_bytes() -> Tensor:
    """Return the two numbers [256, 2] float32 that each byte holds."""
    signed = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)])
    byte = torch.arange(256)
    return torch.stack((signed[byte & 15], signed[byte >> 4]), dim=1)
