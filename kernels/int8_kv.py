"""K and V in int8: in a page each row is a code for each feature and then the row's scale.

A row is what one KV head has of one position. It has one scale, its largest size / 127 in bfloat16,
so that what is kept of it depends on no other row: no batch, chunk or page is in it. (Scales per
token and head; of the many ways to KV in 8 bits, KIVI, arXiv 2402.02750, compares some.)

Shapes: D head_dim.
"""

import torch
from torch import Tensor

from kernels.quantized import row_scales

SCALE_BYTES = 2
_NAN = 0x7FC0  # the bits of one in bfloat16: those that a conversion makes differ between machines


def quantize_rows(x: Tensor) -> Tensor:
    """Return rows [..., D + 2] int8 of x [..., D] of floats.

    The last two bytes are a scale in bfloat16, and a code is x / scale, rounded to the nearest,
    ties to even. A row with a NaN or an infinity has the scale NaN.
    """
    wide = x.float()
    scales = row_scales(wide)[0].bfloat16().unsqueeze(-1)
    scales.view(torch.int16).masked_fill_(scales.isnan(), _NAN)
    codes = wide * (1.0 / scales.float())
    codes = codes.where(scales > 0, 0.0).round_().to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), dim=-1)


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what rows [..., D + 2] stand for, [..., D], rounded to `dtype`."""
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    return (codes.float() * scales.contiguous().view(torch.bfloat16).float()).to(dtype)
