"""What rows of a page table hold is what sequences have, whatever was in the rows before."""

from array import array
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.runners.page_table_rows import PageTableRows

ROWS, PAGES = 4, 12


@dataclass
class Sequence:
    serial: int
    pages: "array[int]"


@given(st.data())
def test_rows_hold_the_pages_of_their_sequences(data: st.DataObject) -> None:
    """Of steps with any of them in any rows, between which they grow, end and are replaced."""
    rows = PageTableRows(np.full((ROWS, PAGES), -1, np.int32))
    running: list[Sequence] = []
    next_page = next_serial = 1
    for _ in range(data.draw(st.integers(1, 12))):
        running = [one for one in running if not data.draw(st.booleans(), label="ends")]
        while len(running) < ROWS and data.draw(st.booleans(), label="starts"):
            running.append(Sequence(next_serial, array("i")))
            next_serial += 1
        for one in running:
            for _ in range(data.draw(st.integers(0 if one.pages else 1, 3), label="grows")):
                if len(one.pages) < PAGES:
                    one.pages.append(next_page)
                    next_page += 1
        order = data.draw(st.permutations(range(len(running))), label="order")
        order = order[: data.draw(st.integers(0, len(order)), label="rows")]
        step = [running[number] for number in order]
        counts = np.array([len(one.pages) for one in step], np.int64)
        knows = data.draw(st.booleans(), label="are told apart")
        serials = np.array([one.serial for one in step], np.int64) if knows else None
        tables = [one.pages for one in running]
        rows.fill(tables, np.array(order, np.int64), counts, serials)
        for row, one in zip(rows.table, step, strict=False):
            assert row[: len(one.pages)].tolist() == list(one.pages)


def test_of_a_sequence_that_was_there_the_new_pages_alone_are_written() -> None:
    rows = PageTableRows(np.zeros((2, 4), np.int32))
    pages, both = [array("i", [7, 8]), array("i", [5])], np.arange(2)
    rows.fill(pages, both, np.array([2, 1]), np.array([1, 2]))
    rows.table[:] = -1
    pages[0].append(9)
    rows.fill(pages, both, np.array([3, 1]), np.array([1, 2]))
    assert rows.table.tolist() == [[-1, -1, 9, -1], [-1, -1, -1, -1]]
    rows.fill(pages, both, np.array([3, 1]), np.array([1, 3]))
    assert rows.table.tolist() == [[-1, -1, 9, -1], [5, -1, -1, -1]]
