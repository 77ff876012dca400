"""Whole pages moved, cut short or cleared, in all layers and both of K and V at once.

A page lies in a staging buffer by layer, then K or V, then as in the pool, so that it is one
contiguous piece and goes to the host in one copy. Copies 32-bit words: any dtype, and NaN bit for
bit.

Shapes: L layers, P pages, n pages of a list, HK KV heads, D head_dim; a pool is
[L, 2, P, HK, page, D], contiguous.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.constants import LAUNCH_OPTIONS

_BLOCK = 2048  # words of a program: four times 16 bytes for each thread of 4 warps
_NUM_WARPS = 4


def gather_pages(pool: Tensor, pages: Tensor, out: Tensor) -> None:
    """Copy pool[:, :, pages] to `out`, one page behind the other.

    Args:
        pool: [L, 2, P, HK, page, D].
        pages: [n] int32.
        out: [n, L, 2, HK, page, D], contiguous, written.
    """
    _check_staged(pool, pages, out)
    _launch(_copy_page, pool, pages, _words(out), TO_POOL=False)


def scatter_pages(staged: Tensor, pool: Tensor, pages: Tensor) -> None:
    """Copy what `gather_pages` laid out to the named pages.

    Args:
        staged: [n, L, 2, HK, page, D], contiguous.
        pool: [L, 2, P, HK, page, D], changed in place.
        pages: [n] int32, all different.
    """
    _check_staged(pool, pages, staged)
    _launch(_copy_page, pool, pages, _words(staged), TO_POOL=True)


def fork_pages(pool: Tensor, sources: Tensor, targets: Tensor, num_positions: Tensor) -> None:
    """Copy the first positions of pages to others, with zeros behind them.

    Args:
        pool: [L, 2, P, HK, page, D], changed in place.
        sources: [n] int32.
        targets: [n] int32, all different, none of them a source.
        num_positions: [n] int32, from 0 to page.
    """
    page_size, head_dim = pool.shape[-2:]
    position_words = head_dim * pool.element_size() // 4
    _launch(
        _fork_page,
        pool,
        targets,
        sources,
        num_positions,
        PAGE=page_size,
        POSITION_WORDS=position_words,
    )


def clear_pages(pool: Tensor, pages: Tensor) -> None:
    """Fill pages with zeros.

    Args:
        pool: [L, 2, P, HK, page, D], changed in place.
        pages: [n] int32.
    """
    _launch(_clear_page, pool, pages)


def _check_staged(pool: Tensor, pages: Tensor, staged: Tensor) -> None:
    num_layers, _, _, *page = pool.shape
    assert staged.shape == (pages.shape[0], num_layers, 2, *page), "one piece for each page"
    assert staged.dtype == pool.dtype


def _words(x: Tensor) -> Tensor:
    """Return x as contiguous 32-bit words in one dimension."""
    assert x.is_contiguous() and x.shape[-1] * x.element_size() % 4 == 0
    return x.view(-1).view(torch.int32)


def _launch(kernel: Any, pool: Tensor, pages: Tensor, *others: Tensor, **constants: Any) -> None:
    """Run `kernel` for each page of the list, each layer's K and V, and each piece of a page."""
    num_layers, two, num_pages, num_kv_heads, page_size, head_dim = pool.shape
    assert two == 2, "a pool holds K and V"
    num_words = num_kv_heads * page_size * head_dim * pool.element_size() // 4
    if pages.shape[0] == 0:
        return
    kernel[(pages.shape[0], num_layers * 2, triton.cdiv(num_words, _BLOCK))](
        _words(pool),
        pages,
        *others,
        num_pages,
        **constants,
        WORDS=num_words,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        **LAUNCH_OPTIONS,
    )


@triton.jit
def _piece_of(pages_ptr, num_pages, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where this program's page begins in the pool, and its words of the page."""
    page = tl.load(pages_ptr + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    return (tl.program_id(1).to(tl.int64) * num_pages + page) * WORDS, at


# Batches differ in these, and a kernel of its own would be compiled while they wait.
@triton.jit(do_not_specialize=["num_pages"])
def _copy_page(
    pool_ptr,
    pages_ptr,
    staged_ptr,
    num_pages,
    TO_POOL: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, at = _piece_of(pages_ptr, num_pages, WORDS, BLOCK)
    piece = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    in_pool, staged = pool_ptr + start + at, staged_ptr + piece * WORDS + at
    mask = at < WORDS
    if TO_POOL:
        tl.store(in_pool, tl.load(staged, mask=mask), mask=mask)
    else:
        tl.store(staged, tl.load(in_pool, mask=mask), mask=mask)


# Batches differ in these, and a kernel of its own would be compiled while they wait.
@triton.jit(do_not_specialize=["num_pages"])
def _fork_page(
    pool_ptr,
    targets_ptr,
    sources_ptr,
    num_positions_ptr,
    num_pages,
    PAGE: tl.constexpr,
    POSITION_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    target, at = _piece_of(targets_ptr, num_pages, WORDS, BLOCK)
    source, at = _piece_of(sources_ptr, num_pages, WORDS, BLOCK)
    mask = at < WORDS
    is_kept = at // POSITION_WORDS % PAGE < tl.load(num_positions_ptr + tl.program_id(0))
    kept = tl.load(pool_ptr + source + at, mask=mask & is_kept, other=0)
    tl.store(pool_ptr + target + at, kept, mask=mask)


# Batches differ in these, and a kernel of its own would be compiled while they wait.
@triton.jit(do_not_specialize=["num_pages"])
def _clear_page(pool_ptr, pages_ptr, num_pages, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    start, at = _piece_of(pages_ptr, num_pages, WORDS, BLOCK)
    tl.store(pool_ptr + start + at, tl.zeros([BLOCK], tl.int32), mask=at < WORDS)
