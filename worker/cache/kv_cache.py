"""The paged KV cache of a rank: K and V of every page, all layers, on device and in host memory.

Owns the memory and its cleanliness: a page is cleared when it is given out, so that nothing left in
it, another tenant's values or a NaN, can reach a result.

Shapes: L layers, P pages, HK KV heads of this rank, D head_dim.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.interface import AnyKernels

if TYPE_CHECKING:
    from worker.protocol import PageCopy


def page_num_bytes(
    num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes that one page takes, K and V of all layers together."""
    return 2 * num_layers * num_kv_heads * page_size * head_dim * dtype.itemsize


class KVCache:
    """Pages of one rank: those that attention reads, and the host tier."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_host_pages: int = 0,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: AnyKernels,
    ) -> None:
        self._kernels = kernels
        self.num_pages = num_pages
        self.num_host_pages = num_host_pages
        self.page_size = page_size
        # Not filled here: every page is cleared or copied to when given out.
        self._pages = kernels.empty_pool(
            (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim), dtype, device
        )
        self._layers = [(pages[0], pages[1]) for pages in self._pages]
        # A host page is one piece of memory, all layers together, so that it crosses in one go.
        self._host_pages = torch.empty(
            (num_host_pages, num_layers, 2, num_kv_heads, page_size, head_dim),
            dtype=dtype,
            device="cpu",
            pin_memory=kernels.pins_memory and num_host_pages > 0,
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (K pages, V pages) of a layer, each [P, HK, page, D]."""
        return self._layers[index]

    def clear(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros in all layers."""
        if pages:
            self._kernels.clear_pages(self._pages, pages)

    def copy(self, copies: Sequence["PageCopy"]) -> None:
        """Make copies one after the other: each sees what those before it have written."""
        for run in _independent(copies):
            self._copy(run)

    def _copy(self, run: Sequence["PageCopy"]) -> None:
        """Make copies of one kind that may be made at once.

        On a GPU all of this is queued on the stream that the forward pass uses, in this order,
        and the CPU never looks at a host page: there is nothing to wait for.
        """
        sources, targets = [one.source for one in run], [one.target for one in run]
        match run[0].kind:
            case "save":
                self._kernels.save_pages(self._pages, sources, self._host_pages, targets)
            case "restore":
                self._kernels.restore_pages(self._host_pages, sources, self._pages, targets)
            case "fork":
                shared = [one.num_positions for one in run]
                self._kernels.fork_pages(self._pages, sources, targets, shared)


def _independent(copies: Sequence["PageCopy"]) -> Iterator[list["PageCopy"]]:
    """Cut copies into runs of one kind in which none reads or writes what another has written."""
    run: list[PageCopy] = []
    for copy in copies:
        written = {one.target for one in run}
        touched = {copy.source, copy.target} if copy.kind == "fork" else {copy.target}
        if run and (run[0].kind != copy.kind or written & touched or _reads(run, copy)):
            yield run
            run = []
        run.append(copy)
    if run:
        yield run


def _reads(run: Sequence["PageCopy"], copy: "PageCopy") -> bool:
    """Whether one of a run of forks reads the page that a fork writes."""
    return copy.kind == "fork" and any(one.source == copy.target for one in run)
