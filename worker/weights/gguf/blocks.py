"""What ggml's blocks of codes mean, in float32.

ggml-quants.c and gguf-py/gguf/quants.py of https://github.com/ggml-org/llama.cpp say it; products
and sums are taken in their order, so that the same bits come out.

Shapes: B blocks of a type, each of W weights and S bytes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker.weights.gguf.block_types import BlockType

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def plain(kind: BlockType, stored: Tensor) -> Tensor:
    """Return the floats [A, n] that bytes [A, m] uint8 of a plain type are."""
    return stored.contiguous().view(_PLAIN[kind.name])


def dequantize(kind: BlockType, blocks: Tensor) -> Tensor:
    """Return the weights [B, W] float32 of blocks [B, S] uint8 of a type that is not plain."""
    assert blocks.shape[1] == kind.num_bytes, f"{kind.name} has blocks of {kind.num_bytes} bytes"
    return _MEANINGS[kind.name](blocks)


def _float16(stored: Tensor) -> Tensor:
    """Return the numbers [B, n] float32 of bytes [B, 2 n] of float16."""
    return stored.contiguous().view(torch.float16).float()


def _nibbles(stored: Tensor, run: int) -> Tensor:
    """Return the codes [B, 2 n] of bytes [B, n]: of each run the low halves, then the high ones."""
    runs = stored.view(len(stored), -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)


def _bits(stored: Tensor, run: int, width: int, count: int) -> Tensor:
    """Return the codes of so many bits [B, n count] of bytes [B, n], the lowest of a run first."""
    shifts = torch.arange(count, dtype=torch.uint8).mul_(width).view(1, 1, count, 1)
    runs = stored.view(len(stored), -1, 1, run)
    return ((runs >> shifts) & ((1 << width) - 1)).flatten(1)


def _fifth_bits(stored: Tensor) -> Tensor:
    """Return the bits [B, 32] of bytes [B, 4], of which the first is the lowest of the first."""
    return (stored.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 2:], 16).to(torch.int8) - 8
    return _float16(blocks[:, :2]) * codes.float()


def _q4_1(blocks: Tensor) -> Tensor:
    scale, least = _float16(blocks[:, :2]), _float16(blocks[:, 2:4])
    return scale * _nibbles(blocks[:, 4:], 16).float() + least


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:], 16) | (_fifth_bits(blocks[:, 2:6]) << 4)
    return _float16(blocks[:, :2]) * (codes.to(torch.int8) - 16).float()


def _q5_1(blocks: Tensor) -> Tensor:
    scale, least = _float16(blocks[:, :2]), _float16(blocks[:, 2:4])
    codes = _nibbles(blocks[:, 8:], 16) | (_fifth_bits(blocks[:, 4:8]) << 4)
    return scale * codes.float() + least


def _q8_0(blocks: Tensor) -> Tensor:
    codes = blocks[:, 2:].contiguous().view(torch.int8)
    return codes.float() * _float16(blocks[:, :2])


def _spread(scales: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales [B, G, 1] and the codes [B, G, n] float32 of groups that each has one for."""
    return scales.unsqueeze(2), codes.float().view(len(codes), scales.shape[1], -1)


def _q2_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, :16]
    scale, least = _float16(blocks[:, 80:82]), _float16(blocks[:, 82:84])
    scales, codes = _spread(scale * (packed & 15).float(), _bits(blocks[:, 16:80], 32, 2, 4))
    return (scales * codes - (least * (packed >> 4).float()).unsqueeze(2)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    # Scales have 6 bits: the low four of all come first, then the high two of all.
    low = _nibbles(blocks[:, 96:104], 8)
    high = _bits(blocks[:, 104:108], 4, 2, 4)
    scales = (low | (high << 4)).to(torch.int8) - 32
    # The third bit of a code is set where nothing is taken away.
    third = _bits(blocks[:, :32], 32, 1, 8).to(torch.int8)
    codes = _bits(blocks[:, 32:96], 32, 2, 4).to(torch.int8) - 4 * (1 - third)
    spread, spread_codes = _spread(_float16(blocks[:, 108:110]) * scales.float(), codes)
    return (spread * spread_codes).flatten(1)


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales [B, 8] and the minima [B, 8] of 6 bits that 12 bytes hold."""
    scales, mins, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    more_scales = (rest & 15) | ((scales >> 2) & 48)
    more_mins = (rest >> 4) | ((mins >> 2) & 48)
    return torch.cat((scales & 63, more_scales), 1), torch.cat((mins & 63, more_mins), 1)


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """Return what codes of Q4_K or Q5_K mean."""
    scale, least = _float16(blocks[:, :2]), _float16(blocks[:, 2:4])
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    spread, spread_codes = _spread(scale * scales.float(), codes)
    return (spread * spread_codes - (least * mins.float()).unsqueeze(2)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = _bits(blocks[:, 16:48], 32, 1, 8)
    return _with_minima(blocks, _nibbles(blocks[:, 48:], 32) | (fifth << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, :128], 64) | (_bits(blocks[:, 128:192], 32, 2, 4) << 4)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    spread, spread_codes = _spread(
        _float16(blocks[:, 208:210]) * scales.float(), codes.to(torch.int8) - 32
    )
    return (spread * spread_codes).flatten(1)


_MEANINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
