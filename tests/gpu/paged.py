"""KV pages for checks and benchmarks: dealt at random, and NaN where no position is.

Owns how a context lies in pages. What attention means is told in kernels.reference.

Shapes: S sequences, HQ / HK heads, D head_dim, P pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from tests.gpu.place import Place

_GARBAGE = 1 << 30  # a page id behind a sequence's pages, never to be followed
_SPARE = 3  # pages of nobody, and columns of the page table


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True, slots=True)
class Paged:
    """Sequences whose K and V lie in pages."""

    heads: Heads
    page: int
    lens: list[int]
    tables: list[list[int]]
    k: list[Tensor]  # of each sequence [length, HK, D], as they lie in the pages
    v: list[Tensor]
    k_pages: Tensor  # [P, HK, page, D]
    v_pages: Tensor
    page_table: Tensor  # [S, pages of the longest + _SPARE] int32

    def attend(
        self, q: Tensor, sequence: int, end: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Return float64 attention of rows q [T, HQ, D] that end at `end` of a sequence."""
        k, v = self.k[sequence][:end], self.v[sequence][:end]
        with q.device:  # the reference makes its masks where new tensors go
            return reference.attention(
                q.double(), k.double(), v.double(), self.heads.scale, sinks=sinks
            )


def make_paged(
    place: Place,
    heads: Heads,
    page: int,
    lens: Sequence[int],
    dtype: torch.dtype,
    first_page: int = 0,
) -> Paged:
    """Return sequences of some lengths; all their pages come at or behind `first_page`."""
    counts = [-(-length // page) for length in lens]
    total = sum(counts)
    order = (first_page + torch.randperm(total + _SPARE)[:total]).tolist()
    shape = (first_page + total + _SPARE, heads.num_kv_heads, page, heads.head_dim)
    k_pages, v_pages = (place.nans(*shape, dtype=dtype) for _ in range(2))
    tables, keys, values = [], [], []
    for length, count in zip(lens, counts, strict=True):
        pages, order = order[:count], order[count:]
        tables.append(pages)
        size = (length, heads.num_kv_heads, heads.head_dim)
        k, v = place.randn(*size, dtype=dtype), place.randn(*size, dtype=dtype)
        at = torch.arange(length, device=place.device)
        page_at = place.int64(pages)[at // page] if length else at
        k_pages[page_at, :, at % page], v_pages[page_at, :, at % page] = k, v
        keys.append(k)
        values.append(v)
    width = max(counts) + _SPARE
    padded = [pages + [_GARBAGE] * (width - len(pages)) for pages in tables]
    return Paged(
        heads, page, list(lens), tables, keys, values, k_pages, v_pages, place.int32(padded)
    )


def filled_pages(place: Place, heads: Heads, page: int, num_pages: int) -> tuple[Tensor, Tensor]:
    """Return (K, V) pages of bfloat16 with numbers everywhere, for benchmarks."""
    shape = (num_pages, heads.num_kv_heads, page, heads.head_dim)
    k, v = (
        torch.empty(shape, dtype=torch.bfloat16, device=place.device).normal_() for _ in range(2)
    )
    return k, v
