"""The free KV pages of a group of ranks; knows nothing of what the others hold."""

from collections.abc import Iterable
from heapq import heappop, heappush


class PagePool:
    """Page ids [0, num_pages): free here, or owned by exactly one holder elsewhere."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # a heap: smallest id first, so plans do not drift
        self._is_free = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take the smallest free pages; there must be enough."""
        assert num_pages <= len(self._free), f"{num_pages} pages of {len(self._free)} free ones"
        pages = [heappop(self._free) for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is free already"
            self._is_free[page] = 1
            heappush(self._free, page)

    def check(self, owned: list[int]) -> None:
        """Assert that `owned`, all pages held elsewhere, and the free ones are every page once."""
        assert sorted(self._free + owned) == list(range(self.num_pages)), (
            "free and owned pages are not every page exactly once"
        )
