"""The picture that a fake rank has of its pages, on the device and in host memory.

Owns, for each position of each page, what made its K and V, and the rules of copies: what is copied
was computed, and what is written over, no sequence holds.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from worker.protocol import PageCopy


@dataclass(frozen=True, slots=True)
class Entry:
    """One position of a page."""

    token_id: int
    content: bytes  # hash of the adapter and of all tokens up to and including this one


class FakePages:
    """Pages of both tiers; None stands at a position that was never computed."""

    def __init__(self, *, page_size: int, num_pages: int, num_host_pages: int) -> None:
        self._page_size = page_size
        self._device: list[list[Entry | None]] = [self._blank() for _ in range(num_pages)]
        self._host: list[list[Entry | None]] = [self._blank() for _ in range(num_host_pages)]

    def read(self, page: int, num_positions: int) -> list[Entry | None]:
        """Return the first positions of a device page."""
        return self._device_page(page)[:num_positions]

    def write(self, page: int, offset: int, entry: Entry) -> None:
        """Put an entry at a position of a device page."""
        self._device_page(page)[offset] = entry

    def clear(self, page: int) -> None:
        """Wipe a device page."""
        self._device_page(page)[:] = self._blank()

    def copy(self, copy: PageCopy, held: AbstractSet[int]) -> None:
        """Make one copy, which must not write over one of the device pages that are `held`."""
        if copy.kind == "fork":
            assert 0 < copy.num_positions <= self._page_size, f"a fork of no such size: {copy}"
            assert copy.source != copy.target, f"a page is copied to itself: {copy}"
        else:
            assert copy.num_positions == self._page_size, f"only forks copy in part: {copy}"
        source = self._host_page if copy.kind == "restore" else self._device_page
        target = self._host_page if copy.kind == "save" else self._device_page
        entries = source(copy.source)[: copy.num_positions]
        assert None not in entries, f"what is copied was never computed: {copy}"
        assert copy.kind == "save" or copy.target not in held, f"a sequence holds it: {copy}"
        target(copy.target)[:] = entries + self._blank()[copy.num_positions :]

    def _device_page(self, page: int) -> list[Entry | None]:
        assert 0 <= page < len(self._device), f"there is no page {page}"
        return self._device[page]

    def _host_page(self, page: int) -> list[Entry | None]:
        assert 0 <= page < len(self._host), f"there is no host page {page}"
        return self._host[page]

    def _blank(self) -> list[Entry | None]:
        return [None] * self._page_size
