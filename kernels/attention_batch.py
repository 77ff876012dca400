"""The plan of one step's attention: which rows attend to which pages, made once for all layers.

For attention in torch a step is cut into tiles. A tile gathers the K and V of a few sequences once
and attends with blocks of their rows; the cut decides speed only, never a bit of the result (the
order of sums is in kernels.attention).

Shapes: T rows, S sequences; C sequences of one tile, R rows of each of them in one block, L columns
of one tile: positions of a sequence's context, padded to whole spans.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

SPAN_POSITIONS = 128  # positions whose products are summed as one; part of the result's definition
_BLOCK_ROWS = 64  # rows of a prefill that attend together
_TILE_SPANS = 48  # spans that the decodes of one tile gather at most: a few MB stay in cache


def span_size(page_size: int) -> int:
    """Return the positions of one span: whole pages, and `SPAN_POSITIONS` of them if they fit."""
    return page_size * max(1, SPAN_POSITIONS // page_size)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of a tile that attend at once: `rows_each` rows of each of the tile's sequences."""

    rows: Tensor  # [C * R] int64, sequence by sequence
    rows_each: int
    positions: Tensor  # [C, R] int64
    num_columns: int  # whole spans, enough for the last row
    num_visible: int  # columns that every row of the block sees
    hidden: Tensor  # [C, 1, R, 1, num_columns - num_visible] bool


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Sequences whose K and V are gathered together."""

    pages: Tensor  # [C, pages] int64, whole spans; page 0 where a sequence has no more pages
    num_filled: int  # columns that hold a position of every sequence
    stale: Tensor  # [C, 1, columns - num_filled, 1] bool: columns past a sequence's context
    blocks: tuple[RowBlock, ...]


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Where the rows of a step lie, on the host: int64, contiguous."""

    page_table: npt.NDArray[np.int64]  # [S, max_pages], zero past a sequence's pages
    kv_loc: npt.NDArray[np.int64]  # [T]: page * page_size + offset, where the row's K and V go
    positions: npt.NDArray[np.int64]  # [T]
    sequences: npt.NDArray[np.int64]  # [S, 3]: first row, rows, positions

    @classmethod
    def empty(cls, num_rows: int, num_sequences: int, max_pages: int) -> "RowArrays":
        """Return arrays that are not filled."""
        shapes = (num_sequences, max_pages), (num_rows,), (num_rows,), (num_sequences, 3)
        return cls(*(np.empty(shape, np.int64) for shape in shapes))


# Fills arrays with query_starts, context_lens, page_tables and page_size as `build` has them.
LayOut = Callable[[RowArrays, Sequence[int], Sequence[int], Sequence[Sequence[int]], int], None]


def lay_out_rows(
    arrays: RowArrays,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    page_tables: Sequence[Sequence[int]],
    page_size: int,
) -> None:
    """Fill the arrays of a step by NumPy; the arguments are those of `AttentionBatch.build`."""
    starts, lengths = np.array(query_starts, np.int64), np.array(context_lens, np.int64)
    num_rows = starts[1:] - starts[:-1]
    arrays.sequences[:, 0] = starts[:-1]
    arrays.sequences[:, 1] = num_rows
    arrays.sequences[:, 2] = lengths
    arrays.page_table[:] = 0
    for row, table, length in zip(arrays.page_table, page_tables, context_lens, strict=True):
        count = -(-length // page_size)
        row[:count] = table[:count]
    sequence_of_row = np.repeat(np.arange(len(lengths)), num_rows)
    positions = np.arange(len(sequence_of_row)) + (lengths - starts[1:])[sequence_of_row]
    of_row = arrays.page_table[sequence_of_row, positions // page_size]
    arrays.positions[:] = positions
    arrays.kv_loc[:] = of_row * page_size + positions % page_size


class AttentionBatch:
    """One step's rows and where the K and V that they see are; made by `build`.

    Rows [query_starts[i], query_starts[i + 1]) are the last positions of sequence i.
    """

    def __init__(
        self,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        arrays: RowArrays,
        page_size: int,
    ) -> None:
        self.query_starts = query_starts  # S + 1
        self.context_lens = context_lens  # S: positions of each sequence, its new rows included
        self.arrays = arrays
        self.page_size = page_size
        self._tiles: list[AttentionTile] = []

    @property
    def page_table(self) -> Tensor:
        """`arrays.page_table` as a tensor, over the same memory."""
        return torch.from_numpy(self.arrays.page_table)

    @property
    def kv_loc(self) -> Tensor:
        """`arrays.kv_loc`, likewise."""
        return torch.from_numpy(self.arrays.kv_loc)

    @property
    def positions(self) -> Tensor:
        """`arrays.positions`, likewise."""
        return torch.from_numpy(self.arrays.positions)

    def tiles(self) -> Sequence[AttentionTile]:
        """Return the tiles, cut at the first call: attention in C never asks for them."""
        if not self._tiles:
            self._tiles.extend(_tiles(self))
        return self._tiles

    @classmethod
    def build(
        cls,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        page_size: int,
        lay_out: LayOut = lay_out_rows,
    ) -> "AttentionBatch":
        """Plan a step from host lists.

        Args:
            query_starts: S + 1 row offsets, from 0, strictly increasing.
            context_lens: S counts of positions, each at least its sequence's rows.
            page_tables: S page lists, each covering its context; what lies beyond is ignored.
            page_size: positions of a page.
            lay_out: what fills the arrays.
        """
        num_sequences = len(context_lens)
        assert len(query_starts) - 1 == num_sequences == len(page_tables), "lists of unequal length"
        for i, (length, table) in enumerate(zip(context_lens, page_tables, strict=True)):
            num_rows = query_starts[i + 1] - query_starts[i]
            assert 0 < num_rows <= length, f"{num_rows} rows in a context of {length}"
            assert length <= len(table) * page_size, f"{len(table)} pages cannot hold {length}"
        max_pages = -(-max(context_lens, default=0) // page_size)
        arrays = RowArrays.empty(query_starts[-1], num_sequences, max_pages)
        lay_out(arrays, query_starts, context_lens, page_tables, page_size)
        return cls(tuple(query_starts), tuple(context_lens), arrays, page_size)


def _tiles(batch: AttentionBatch) -> Iterator[AttentionTile]:
    """Cut a step: decodes of like length together, every prefill chunk alone."""
    page_size = batch.page_size
    query_starts, context_lens = batch.query_starts, batch.context_lens
    span = span_size(page_size)
    num_rows = [b - a for a, b in zip(query_starts, query_starts[1:], strict=False)]
    decodes = [i for i, rows in enumerate(num_rows) if rows == 1]
    groups = _group_by_spans({i: -(-context_lens[i] // span) for i in decodes})
    groups += [[i] for i, rows in enumerate(num_rows) if rows > 1]
    for group in groups:
        lengths = [context_lens[i] for i in group]
        num_columns = -(-max(lengths) // span) * span
        columns = torch.arange(min(lengths), num_columns)
        stale = columns >= torch.tensor(lengths).view(-1, 1, 1)
        yield AttentionTile(
            pages=_resize(batch.page_table[group], num_columns // page_size),
            num_filled=min(lengths),
            stale=stale.unsqueeze(-1),
            blocks=tuple(
                _row_block(
                    first_rows=[query_starts[i] + offset for i in group],
                    first_positions=[context_lens[i] - num_rows[i] + offset for i in group],
                    rows_each=min(_BLOCK_ROWS, num_rows[group[0]] - offset),
                    span=span,
                )
                for offset in range(0, num_rows[group[0]], _BLOCK_ROWS)
            ),
        )


def _row_block(
    first_rows: list[int],
    first_positions: list[int],
    rows_each: int,
    span: int,
) -> RowBlock:
    """Plan `rows_each` successive rows of each sequence of a tile."""
    offsets = torch.arange(rows_each)
    rows = torch.tensor(first_rows).unsqueeze(1) + offsets
    positions = torch.tensor(first_positions).unsqueeze(1) + offsets
    num_columns = -(-(max(first_positions) + rows_each) // span) * span
    num_visible = min(first_positions) + 1
    hidden = torch.arange(num_visible, num_columns) > positions.unsqueeze(-1)
    return RowBlock(
        rows=rows.flatten(),
        rows_each=rows_each,
        positions=positions,
        num_columns=num_columns,
        num_visible=num_visible,
        hidden=hidden.view(len(first_rows), 1, rows_each, 1, -1),
    )


def _group_by_spans(num_spans: dict[int, int]) -> list[list[int]]:
    """Group sequences so that padding to a group's longest wastes at most about a quarter."""
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(num_spans, key=lambda i: (-num_spans[i], i)):
        wasted = longest - num_spans[i]
        if groups and wasted <= 1 + longest // 4 and (len(groups[-1]) + 1) * longest <= _TILE_SPANS:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = num_spans[i]
    return groups


def _resize(pages: Tensor, num_pages: int) -> Tensor:
    """Return page lists [C, any] as [C, num_pages], cut or padded with page 0."""
    pages = pages[:, :num_pages]
    return F.pad(pages, (0, num_pages - pages.shape[1]))
