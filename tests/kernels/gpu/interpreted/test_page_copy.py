"""kernels.gpu.page_copy: pages arrive bit for bit, and no other page is touched."""

from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.gpu.page_copy import clear_pages, fork_pages, gather_pages, scatter_pages

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
DTYPES = list(BITS)
SHAPES = [(2, 3, 4, 64), (1, 1, 16, 128), (3, 2, 5, 96), (1, 2, 64, 72)]  # L, HK, page, D
CASES = list(product(SHAPES, DTYPES))
NUM_PAGES = 7


def pool_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Return a pool of arbitrary bits, NaN of all kinds among them."""
    num_layers, *page = shape
    whole = (num_layers, 2, NUM_PAGES, *page)
    high = 1 << 31 if dtype == torch.float32 else 1 << 15
    generator = torch.Generator().manual_seed(sum(whole))
    return torch.randint(-high, high, whole, generator=generator).to(BITS[dtype]).view(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(BITS[x.dtype])


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_gathered_pages_lie_one_behind_the_other(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    pool, pages = pool_of(shape, dtype), int32(6, 0, 3, 3)
    before = pool.clone()
    out = torch.full((4, shape[0], 2, *shape[1:]), torch.nan, dtype=dtype)
    gather_pages(pool, pages, out)
    expected = bits(pool)[:, :, pages.long()].permute(2, 0, 1, 3, 4, 5)
    assert torch.equal(bits(out), expected)
    assert torch.equal(bits(pool), bits(before))


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_scattered_pages_are_those_that_were_gathered(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    pool, pages, others = pool_of(shape, dtype), int32(6, 0, 3), int32(1, 6, 2)
    staged = torch.empty((3, shape[0], 2, *shape[1:]), dtype=dtype)
    gather_pages(pool, pages, staged)
    before, kept = pool.clone(), staged.clone()
    scatter_pages(staged, pool, others)
    expected = bits(before).clone()
    expected[:, :, others.long()] = bits(before)[:, :, pages.long()]
    assert torch.equal(bits(pool), expected)
    assert torch.equal(bits(staged), bits(kept))


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_a_fork_has_the_first_positions_and_zeros_behind(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """The positions behind are poisoned in the source; two forks may have the same source."""
    pool, page_size = pool_of(shape, dtype), shape[2]
    counts = (0, 1, page_size - 1, page_size)
    sources, targets = (5, 1, 5, 3), (0, 2, 6, 4)
    pool[:, :, 1, :, 1:] = torch.nan
    expected = bits(pool).clone()
    for source, target, count in zip(sources, targets, counts, strict=True):
        expected[:, :, target] = 0
        expected[:, :, target, :, :count] = expected[:, :, source, :, :count]
    fork_pages(pool, int32(*sources), int32(*targets), int32(*counts))
    assert torch.equal(bits(pool), expected)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_cleared_pages_are_zeros_and_no_others(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    pool = pool_of(shape, dtype)
    expected = bits(pool).clone()
    expected[:, :, [6, 0]] = 0
    clear_pages(pool, int32(6, 0))
    assert torch.equal(bits(pool), expected)


def test_an_empty_list_is_no_work() -> None:
    pool = pool_of(SHAPES[0], torch.bfloat16)
    before, nothing = pool.clone(), int32()
    gather_pages(pool, nothing, torch.empty(0, 2, 2, 3, 4, 64, dtype=torch.bfloat16))
    scatter_pages(torch.empty(0, 2, 2, 3, 4, 64, dtype=torch.bfloat16), pool, nothing)
    fork_pages(pool, nothing, nothing, nothing)
    clear_pages(pool, nothing)
    assert torch.equal(bits(pool), bits(before))


def test_ids_behind_the_list_have_no_effect() -> None:
    pool = pool_of(SHAPES[0], torch.float16)
    expected = bits(pool).clone()
    expected[:, :, 2] = 0
    clear_pages(pool, torch.tensor([2, 999999, -7], dtype=torch.int32)[:1])
    assert torch.equal(bits(pool), expected)
