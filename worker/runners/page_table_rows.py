"""A batch's page table on the host, of which a step writes what has changed since the last one.

Decodes of long contexts have thousands of pages and a new one every few steps.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.integer]


class PageTableRows:
    """The rows of a page table; behind the pages of a sequence a row holds what it held before."""

    def __init__(self, table: Array) -> None:
        """Take over a table [rows, pages], which nobody else may write to."""
        self.table = table
        # Of each row: the number of the sequence that it was filled with, and of its pages.
        self._serials = np.zeros(len(table), np.int64)
        self._counts = np.zeros(len(table), np.int64)

    def fill(
        self,
        tables: Sequence[Sequence[int]],
        sequences: Array,
        counts: Array,
        serials: Array | None = None,
    ) -> None:
        """Have the first rows hold the pages of sequences.

        Args:
            tables: of every sequence of a step, its pages.
            sequences: which of them this table is of, by row.
            counts: of each row, how many of the pages.
            serials: of each row, a number from 1 on that no other sequence has, while its pages are
                only ever added to; None: all are written.
        """
        first, starts = slice(0, len(sequences)), np.zeros(len(sequences), np.int64)
        if serials is not None:
            starts = self._counts[first] * (self._serials[first] == serials)
        self._serials[first] = 0 if serials is None else serials
        self._counts[first] = counts
        for row in np.flatnonzero(starts < counts).tolist():
            span = slice(starts[row], counts[row])
            self.table[row, span] = np.asarray(tables[sequences[row]])[span]
