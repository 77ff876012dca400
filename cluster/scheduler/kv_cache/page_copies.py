"""The copies of pages that the next plan has, in the order in which they are to be made.

The bookkeeping of all pools is sequential, and so are the copies: a page may be saved and given out
again at once.
"""

from worker.protocol import PageCopy


class PageCopies:
    """What is noted until a plan takes it."""

    def __init__(self) -> None:
        self._copies: list[PageCopy] = []

    def note(self, copy: PageCopy) -> None:
        """Put a copy behind all that are noted."""
        self._copies.append(copy)

    def take(self) -> tuple[PageCopy, ...]:
        """Return the copies noted since the last call."""
        if not self._copies:
            return ()
        copies, self._copies = tuple(self._copies), []
        return copies
