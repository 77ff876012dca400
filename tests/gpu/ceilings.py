"""What this GPU can do at most, measured in the same call as what is held against it.

Owns the ceilings and the floors that follow: bytes over bandwidth, operations over the rate of a
matrix product. Nothing is taken from a data sheet.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from tests.gpu.place import Place
from tests.gpu.timing import time_calls

_BLOCK = 4096
_LAUNCHES = 50


@dataclass(frozen=True, slots=True)
class Ceilings:
    """In SI units."""

    copy: float  # bytes a second, read and written
    read: float  # bytes a second
    matmul: float  # bfloat16 operations a second
    launch: float  # seconds from one empty kernel to the next in a graph


@cache
def ceilings(place: Place) -> Ceilings:
    """Measure all of them, once in a process."""
    return Ceilings(_copy(place), _read(place), _matmul(place), _launch(place))


def _copy(place: Place) -> float:
    """Measure a copy on the device, the best of a few sizes."""
    best = 0.0
    for num_bytes in place.pick((1 << 30, 4 << 30), (1 << 12,)):
        x = torch.empty(num_bytes // 4, device=place.device).normal_()
        y = torch.empty_like(x)
        best = max(best, 2 * num_bytes / time_calls(place, [lambda x=x, y=y: y.copy_(x)]).median)
    return best


def _read(place: Place) -> float:
    """Measure reading: sums by torch and by a kernel that does nothing else, the better of both."""
    num_bytes = place.pick(4 << 30, 1 << 16)
    x = torch.empty(num_bytes // 4, device=place.device).normal_()
    sums = torch.empty(num_bytes // 4 // _BLOCK, device=place.device)
    ours = time_calls(place, [lambda: _sum_blocks[(sums.shape[0],)](x, sums, BLOCK=_BLOCK)])
    torchs = time_calls(place, [lambda: x.sum()])
    return num_bytes / min(ours.median, torchs.median)


def _matmul(place: Place) -> float:
    size = place.pick(8192, 32)
    a, b = (place.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / time_calls(place, [lambda: torch.mm(a, b, out=out)]).median


def _launch(place: Place) -> float:
    x = torch.empty(1, device=place.device)
    return time_calls(place, [lambda: _nothing[(1,)](x)] * place.pick(_LAUNCHES, 1)).median


@triton.jit
def _sum_blocks(x_ptr, sums_ptr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + block, tl.sum(x))


@triton.jit
def _nothing(x_ptr):
    pass
