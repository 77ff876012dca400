"""The ids of a pool's pages: free, or owned by exactly one holder elsewhere."""

from collections.abc import Iterable
from heapq import heappop, heappush


class PagePool:
    """Page ids [0, num_pages): free here, or owned by exactly one holder elsewhere."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_used = 0  # pages [_num_used, num_pages) have never been given out
        self._returned: list[int] = []  # the other free ones, all smaller; a heap
        self._is_free = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._returned) + self.num_pages - self._num_used

    def allocate(self, num_pages: int) -> list[int]:
        """Take the smallest free pages, so that plans do not drift; there must be enough."""
        assert num_pages <= self.num_free, f"{num_pages} pages of {self.num_free} free ones"
        num_returned = min(num_pages, len(self._returned))
        pages = [heappop(self._returned) for _ in range(num_returned)]
        end = self._num_used + num_pages - num_returned
        pages += range(self._num_used, end)
        self._num_used = end
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is free already"
            self._is_free[page] = 1
            heappush(self._returned, page)

    def check(self, owned: list[int]) -> None:
        """Assert that `owned`, all pages held elsewhere, and the free ones are every page once."""
        assert 0 <= self._num_used <= self.num_pages, "more pages are used than there are"
        unused = range(self._num_used, self.num_pages)
        assert sorted([*self._returned, *unused, *owned]) == list(range(self.num_pages)), (
            "free and owned pages are not every page exactly once"
        )
