"""The K and V of every page this rank holds, for all layers.

Owns the memory and its cleanliness: a page is cleared when it is given out, so that nothing left in
it, another tenant's values or a NaN, can reach a result. Knows nothing of who owns a page.

Shapes: L layers, P pages, HK KV heads of this rank, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def page_num_bytes(
    num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes that one page takes, K and V of all layers together."""
    return 2 * num_layers * num_kv_heads * page_size * head_dim * dtype.itemsize


class KVCache:
    """Pages of one rank."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # Not filled here: every page is cleared when given out, and memory that no page has
        # used yet then costs nothing.
        self._pages = torch.empty(
            (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim),
            dtype=dtype,
            device=device,
        )
        self._layers = [(pages[0], pages[1]) for pages in self._pages]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (K pages, V pages) of a layer, each [P, HK, page, D]."""
        return self._layers[index]

    def clear(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros in all layers."""
        if pages:
            index = torch.tensor(pages, dtype=torch.int64, device=self._pages.device)
            self._pages.index_fill_(2, index, 0)
