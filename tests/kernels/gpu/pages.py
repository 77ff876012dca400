"""Sequences scattered over pages whose every other value is NaN, for tests of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
GARBAGE = 10**8  # as a page id or a row it would be found out


@dataclass(frozen=True, slots=True)
class Pool:
    """Random K, V and q of each position of each sequence."""

    k_pages: Tensor
    v_pages: Tensor
    q: tuple[Tensor, ...]
    tables: tuple[list[int], ...]
    window: int = 0  # of all rows; 0: all positions
    sinks: Tensor | None = None  # of the heads

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[2]

    @property
    def scale(self) -> float:
        return float(0.7 * self.k_pages.shape[3] ** -0.5)

    def lengths(self, sequences: Sequence[int]) -> list[int]:
        return [len(self.q[i]) for i in sequences]

    def page_table(self, sequences: Sequence[int]) -> Tensor:
        """Return the page lists as a view of a wider table, garbage wherever nothing belongs."""
        width = max([len(self.tables[i]) for i in sequences], default=0)
        table = torch.full((len(sequences), width + 3), GARBAGE, dtype=torch.int32)
        for row, i in zip(table, sequences, strict=True):
            row[: len(self.tables[i])] = torch.tensor(self.tables[i])
        return table[:, :width]

    def expected(self, sequence: int, first: int, last: int) -> Tensor:
        """Return what the float64 reference makes of positions [first, last)."""
        table = self.tables[sequence]
        k = reference.read_pages(self.k_pages, table, last).double()
        v = reference.read_pages(self.v_pages, table, last).double()
        q = self.q[sequence][first:last].double()
        return reference.attention(q, k, v, self.scale, self.window or None, self.sinks)

    def as_written_up_to(self, sequence: int, length: int) -> "Pool":
        """Return a copy in which K and V from position `length` on are not there yet."""
        k_pages, v_pages = self.k_pages.clone(), self.v_pages.clone()
        for index, page in enumerate(self.tables[sequence]):
            offset = max(0, length - index * self.page_size)
            k_pages[page, :, offset:] = torch.nan
            v_pages[page, :, offset:] = torch.nan
        return replace(self, k_pages=k_pages, v_pages=v_pages)


def make_pool(
    lengths: Sequence[int],
    dtype: torch.dtype,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    page_size: int = 16,
    sharpness: float = 2.0,
    seed: int = 0,
) -> Pool:
    """Return sequences of these lengths; the greater `sharpness`, the fewer positions matter."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    free = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    k_pages = torch.full((len(free), heads[1], page_size, head_dim), torch.nan, dtype=dtype)
    v_pages = k_pages.clone()
    tables, queries = [], []
    for length, count in zip(lengths, counts, strict=True):
        table, free = free[:count], free[count:]
        k, v = (torch.randn(length, heads[1], head_dim, generator=generator) for _ in range(2))
        for index, page in enumerate(table):
            first = index * page_size
            size = min(page_size, length - first)
            k_pages[page, :, :size] = k[first : first + size].transpose(0, 1).to(dtype)
            v_pages[page, :, :size] = v[first : first + size].transpose(0, 1).to(dtype)
        q = sharpness * torch.randn(length, heads[0], head_dim, generator=generator)
        tables.append(table)
        queries.append(q.to(dtype))
    return Pool(k_pages, v_pages, tuple(queries), tuple(tables))


def with_sinks(pool: Pool, window: int = 0, louder: float = 0.0) -> Pool:
    """Return the same sequences with sinks, which are `louder` than they would be."""
    num_heads = pool.q[0].shape[1]
    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(9)) * 2 + louder
    return replace(pool, window=window, sinks=sinks)


def poisoned_rows(num_rows: int, pool: Pool) -> tuple[Tensor, Tensor]:
    """Return q, a view of wider rows, and out, each [num_rows, HQ, D] of NaN."""
    _, num_heads, head_dim = pool.q[0].shape
    num_kv_heads, dtype = pool.k_pages.shape[1], pool.k_pages.dtype
    qkv = torch.full((num_rows, num_heads + 2 * num_kv_heads, head_dim), torch.nan, dtype=dtype)
    out = torch.full((num_rows, num_heads, head_dim), torch.nan, dtype=dtype)
    return qkv[:, :num_heads], out


def vast_zeros() -> Tensor:
    """Return more than 2^31 float16 zeros, which take memory only where they are touched."""
    return torch.from_numpy(np.zeros((1 << 31) + (1 << 20), np.float16))


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())
