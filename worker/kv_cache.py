"""The K and V of every page this rank holds, for all layers, on the device and in host memory.

Owns the memory and its cleanliness: a page is cleared when it is given out, so that nothing left in
it, another tenant's values or a NaN, can reach a result. Knows nothing of who owns a page.

Shapes: L layers, P pages, HK KV heads of this rank, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.protocol import PageCopy


def page_num_bytes(
    num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes that one page takes, K and V of all layers together."""
    return 2 * num_layers * num_kv_heads * page_size * head_dim * dtype.itemsize


class KVCache:
    """Pages of one rank: those that attention reads, and those in host memory that wait."""

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
    ) -> None:
        self.num_pages = num_pages
        self.num_host_pages = num_host_pages
        self.page_size = page_size
        # Not filled here: every page is cleared or copied to when given out, and memory that no
        # page has used yet then costs nothing.
        self._pages = torch.empty(
            (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim),
            dtype=dtype,
            device=device,
        )
        self._layers = [(pages[0], pages[1]) for pages in self._pages]
        # A host page is one piece of memory, all layers together, so that it crosses in one go.
        self._host_pages = torch.empty(
            (num_host_pages, num_layers, 2, num_kv_heads, page_size, head_dim),
            dtype=dtype,
            device="cpu",
            pin_memory=device.type == "cuda" and num_host_pages > 0,
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (K pages, V pages) of a layer, each [P, HK, page, D]."""
        return self._layers[index]

    def clear(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros in all layers."""
        if pages:
            index = torch.tensor(pages, dtype=torch.int64, device=self._pages.device)
            self._pages.index_fill_(2, index, 0)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Make copies one after the other: each sees what those before it have written."""
        for copy in copies:
            self._copy(copy)

    def _copy(self, copy: PageCopy) -> None:
        # On a GPU all of this is queued on the stream that the forward pass uses, in this order,
        # and the CPU never looks at a host page: there is nothing to wait for.
        match copy.kind:
            case "save":
                host_page = self._host_pages[copy.target]
                host_page.copy_(self._pages[:, :, copy.source], non_blocking=True)
            case "restore":
                page = self._pages[:, :, copy.target]
                page.copy_(self._host_pages[copy.source], non_blocking=True)
            case "fork":
                page, shared = self._pages[:, :, copy.target], copy.num_positions
                page[..., :shared, :] = self._pages[:, :, copy.source, :, :shared]
                page[..., shared:, :] = 0
