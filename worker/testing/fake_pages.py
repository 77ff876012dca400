"""The picture that a fake rank has of its pages, on the device and in host memory.

Owns, for each position of each page, what made its K and V, and the rules of copies: what is copied
was computed, and what is written over, no sequence holds.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from worker.protocol import Chunk, PageCopy, SequenceStart


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


class FakeWindow:
    """What one sequence has of the pages of layers with a sliding window."""

    def __init__(
        self,
        pages: FakePages,
        page_size: int,
        size: int,
        start: SequenceStart,
        entries: list[Entry],
        num_pages: int,
    ) -> None:
        """Begin with what a start names, and check that it is there.

        Args:
            pages: of the layers.
            page_size: positions.
            size: positions that a row sees, its own the last; 0: there are no such layers.
            start: of the sequence.
            entries: of its cached positions.
            num_pages: of its page table.
        """
        self._pages = pages
        self._page_size = page_size
        self._size = size
        self._entries = list(entries)
        self._first = num_pages - len(start.window_pages)  # page of the table
        self._table = list(start.window_pages)
        self.owned: set[int] = set()
        assert self._first >= 0, f"sequence {start.seq_id} starts on too many window pages"
        assert size or not self._table, f"sequence {start.seq_id} starts on pages of no layer"
        self._check(f"sequence {start.seq_id}")

    def held(self) -> list[int]:
        """Return the pages that the next position sees."""
        return self._table[max(0, self._first_seen() // self._page_size - self._first) :]

    def grow(self, chunk: Chunk) -> None:
        """Take a chunk's pages and check what its rows see of the positions before them."""
        num_new = len(chunk.new_pages) if self._size else 0
        assert len(chunk.new_window_pages) == num_new, f"{chunk} grows its tables unevenly"
        self._table += chunk.new_window_pages
        self.owned.update(chunk.new_window_pages)
        self._check(f"sequence {chunk.seq_id}")

    def write(self, entry: Entry) -> None:
        """Write the next position."""
        position = len(self._entries)
        self._entries.append(entry)
        if self._size:
            page = self._page_of(position)
            assert page in self.owned, f"window page {page} is written, which is shared"
            self._pages.write(page, position % self._page_size, entry)

    def _first_seen(self) -> int:
        """Return the first position that the next one sees; that itself if it sees no others."""
        return max(0, len(self._entries) + 1 - self._size) if self._size else len(self._entries)

    def _page_of(self, position: int) -> int:
        at = position // self._page_size - self._first
        assert 0 <= at < len(self._table), f"no window page for position {position}"
        return self._table[at]

    def _check(self, who: str) -> None:
        for position in range(self._first_seen(), len(self._entries)):
            page, offset = self._page_of(position), position % self._page_size
            found = self._pages.read(page, offset + 1)[offset]
            assert found == self._entries[position], (
                f"{who}: window page {page} does not hold position {position}"
            )


@dataclass(frozen=True, slots=True)
class FakeState:
    """What a state page holds: all that its sequence has computed."""

    num_tokens: int
    content: bytes  # as that of the last `Entry`, or of none


class FakeStates:
    """State pages of both tiers, None where nothing was ever written."""

    def __init__(self, *, page_size: int, num_pages: int, num_host_pages: int) -> None:
        self._page_size = page_size
        self._device: list[FakeState | None] = [None] * num_pages
        self._host: list[FakeState | None] = [None] * num_host_pages

    def __getitem__(self, page: int) -> FakeState | None:
        assert 0 <= page < len(self._device), f"there is no state page {page}"
        return self._device[page]

    def __setitem__(self, page: int, state: FakeState) -> None:
        assert 0 <= page < len(self._device), f"there is no state page {page}"
        self._device[page] = state

    def copy(self, copy: PageCopy, held: AbstractSet[int]) -> None:
        """Make one copy, which must not write over one of the device pages that are `held`."""
        assert copy.num_positions == self._page_size, f"a state is copied whole: {copy}"
        source = self._host if copy.kind == "restore" else self._device
        target = self._host if copy.kind == "save" else self._device
        assert 0 <= copy.source < len(source), f"there is no such page: {copy}"
        assert 0 <= copy.target < len(target), f"there is no such page: {copy}"
        assert source[copy.source] is not None, f"what is copied was never computed: {copy}"
        assert copy.kind == "save" or copy.target not in held, f"a sequence holds it: {copy}"
        target[copy.target] = source[copy.source]
