"""The arrays that say where a step's rows lie, filled in C: a step waits for them."""

from array import array
from collections.abc import Sequence

from kernels.attention_batch import LayOut, RowArrays
from kernels.native.library import Library, RowLayout


def lay_out_by(library: Library) -> LayOut:
    """Return what fills the arrays of `AttentionBatch.build`."""

    def lay_out(
        arrays: RowArrays,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        page_size: int,
    ) -> None:
        starts, lengths = array("q", query_starts), array("q", context_lens)
        tables = [_pages(table) for table in page_tables]
        addresses = array("Q", [table.buffer_info()[0] for table in tables])
        library.lay_out_rows(
            RowLayout(
                *(given.buffer_info()[0] for given in (starts, lengths, addresses)),
                *arrays.page_table.shape,
                page_size,
                arrays.page_table.ctypes.data,
                arrays.kv_loc.ctypes.data,
                arrays.positions.ctypes.data,
                arrays.sequences.ctypes.data,
            )
        )

    return lay_out


def _pages(table: Sequence[int]) -> "array[int]":
    """Return pages as int32, themselves if they are."""
    if isinstance(table, array) and table.typecode == "i":
        return table
    return array("i", table)
