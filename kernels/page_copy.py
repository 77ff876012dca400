"""Whole pages moved, cut short or cleared, in all layers and both of K and V at once.

In torch, one page after the other.

Shapes: L layers, P pages, HK KV heads, D head_dim; a pool is [L, 2, P, HK, page, D], pages in host
memory are [host pages, L, 2, HK, page, D], each one piece of memory.
"""

from collections.abc import Sequence

from torch import Tensor


def save_pages(pool: Tensor, sources: Sequence[int], host: Tensor, targets: Sequence[int]) -> None:
    """Copy pages of a pool to host pages."""
    for source, target in zip(sources, targets, strict=True):
        host[target].copy_(pool[:, :, source])


def restore_pages(
    host: Tensor, sources: Sequence[int], pool: Tensor, targets: Sequence[int]
) -> None:
    """Copy host pages to pages of a pool."""
    for source, target in zip(sources, targets, strict=True):
        pool[:, :, target].copy_(host[source])


def fork_pages(
    pool: Tensor, sources: Sequence[int], targets: Sequence[int], num_positions: Sequence[int]
) -> None:
    """Copy the first positions of each source, and put zeros behind; no target is a source."""
    for source, target, shared in zip(sources, targets, num_positions, strict=True):
        page = pool[:, :, target]
        page[..., :shared, :] = pool[:, :, source, :, :shared]
        page[..., shared:, :] = 0


def clear_pages(pool: Tensor, pages: Sequence[int] | Tensor) -> None:
    """Fill pages with zeros, one after the other: index_fill_ takes four times as long."""
    for page in pages:
        pool[:, :, page].zero_()
