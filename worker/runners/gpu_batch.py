"""The static input buffers of a GPU's batch: one step's rows, sent in one copy.

They may be larger than a step needs: kernels do nothing in the rest, which is padding. So a CUDA
graph can be captured once and replayed with other rows.

Shapes: as in kernels.gpu.batch_metadata.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu.attention.paged_decode import most_splits
from kernels.gpu.attention.paged_prefill import cut_prefill
from kernels.gpu.batch_metadata import (
    AttentionMetadata,
    ExpertLoraMetadata,
    LoraMetadata,
    StateMetadata,
    state_numbers,
)
from kernels.gpu.lora.apply import NUM_SHARES, cut_tiles, share_tiles
from kernels.recurrent.state_runs import state_runs
from worker.cache.kv_cache import KVCache
from worker.lora.adapter_bank import AdapterBank
from worker.models.forward_batch import ForwardBatch, InputBatch
from worker.pools import PoolName
from worker.runners.device_arrays import DeviceArrays
from worker.runners.page_table_rows import PageTableRows

Array = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The sizes of the buffers: how many of each kind they can hold."""

    rows: int
    samples: int
    decodes: int
    prefills: int
    blocks: int  # of prefill
    tiles: int  # of LoRA
    pages: int  # of the widest page table
    max_splits: int  # of the longest context that decodes
    max_lora_rank: int  # 0: no adapters
    new_pages: int  # of each pool


@dataclass(frozen=True, slots=True)
class _Cut:
    """A step's rows, cut for the kernels."""

    starts: npt.NDArray[np.int64]  # of each sequence's rows, and where the last one's end
    lengths: npt.NDArray[np.int64]  # positions of each sequence
    decodes: npt.NDArray[np.int64]  # sequences
    prefills: npt.NDArray[np.int64]
    blocks: list[tuple[int, int, int, int]]
    tiles: list[tuple[int, int, int]]


class GpuBatch:
    """Arrays on the host and the device for batches of at most one size."""

    def __init__(
        self,
        size: BatchSize,
        bank: AdapterBank,
        device: torch.device,
        pins_memory: bool,
        pools: Sequence[PoolName] = ("full",),
    ) -> None:
        self.size = size
        self._attended: Sequence[PoolName] = [pool for pool in pools if pool != "state"]
        self._has_states = "state" in pools
        self._bank = bank
        int32, int64 = torch.int32, torch.int64
        self._arrays = DeviceArrays(
            {
                "token_ids": (int64, (size.rows,)),
                "pending_rows": (int64, (size.rows,)),
                "positions": (int64, (size.rows,)),
                "samples": (int64, (size.samples,)),
                "decode_rows": (int32, (size.decodes,)),
                "decode_lens": (int32, (size.decodes,)),
                "blocks": (int32, (size.blocks, 4)),
                "tiles": (int32, (size.tiles, 3)),
                "shares": (int32, (NUM_SHARES + 1, 4)),
                "row_slots": (int32, (size.rows,)),
            }
            | {f"{pool} kv_loc": (int64, (size.rows,)) for pool in self._attended}
            | {f"{pool} new_pages": (int32, (size.new_pages,)) for pool in self._attended}
            | self._of_states(size)
            | {
                f"{pool} {table}": (int32, (num_sequences, size.pages))
                for pool in self._attended
                for table, num_sequences in (
                    ("decode_table", size.decodes),
                    ("prefill_table", size.prefills),
                )
            },
            device,
            pins_memory,
        )
        host = self._arrays.writable()
        self._tables = {
            name: PageTableRows(host[name])
            for pool in self._attended
            for name in (f"{pool} decode_table", f"{pool} prefill_table")
        }

    def _of_states(self, size: BatchSize) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the arrays of layers with states, if there are any."""
        if not self._has_states:
            return {}
        num_runs = size.decodes + size.prefills
        return {"runs": (torch.int32, (num_runs, 4)), "row_runs": (torch.int32, (size.rows,))}

    def send(
        self, rows: InputBatch, cut: _Cut, page_size: int, pending: Tensor | None = None
    ) -> None:
        """Fill the arrays with a step that fits, and copy them to the device.

        `pending` are the tokens [n] int64 of `rows.pending_rows`, on the device already.
        """
        host, size = self._arrays.writable(), self.size
        self._fill_places(host, rows, cut, page_size)
        if self._has_states:
            runs = state_runs(rows.query_starts, rows.context_lens, rows.state_pages)
            numbers, row_runs = state_numbers(len(rows.token_ids), runs)
            host["runs"][:] = 0
            host["runs"][: len(numbers)] = np.array(numbers).reshape(-1, 4)
            _fill(host["row_runs"], row_runs, -1)
        _fill(host["token_ids"], rows.token_ids, 0)
        _fill(host["pending_rows"], rows.pending_rows, 0)
        _fill(host["samples"], rows.sample_rows, 0)
        _fill(host["decode_rows"], cut.starts[cut.decodes], 0)
        _fill(host["decode_lens"], cut.lengths[cut.decodes], 0)
        assert len(cut.blocks) == size.blocks, "prefills are never padded"
        host["blocks"][:] = np.array(cut.blocks).reshape(-1, 4)
        host["tiles"][:] = 0
        host["tiles"][: len(cut.tiles)] = np.array(cut.tiles).reshape(-1, 3)
        if size.tiles:
            host["shares"][:] = self._shares(cut)
        host["row_slots"][:] = -1
        for run in rows.runs:
            host["row_slots"][run.start : run.stop] = run.slot
        for pool, pages in self._new_pages(rows).items():
            host[f"{pool} new_pages"][: len(pages)] = pages
        self._arrays.send()
        if pending is not None:
            on_device = self._arrays.device
            index = on_device["pending_rows"][: len(rows.pending_rows)]
            on_device["token_ids"].index_copy_(0, index, pending)

    def _shares(self, cut: _Cut) -> Array:
        """Return `share_tiles` of a step's tiles."""
        table = self._bank.table
        assert table is not None, "a bank for a GPU keeps a table"
        return share_tiles(cut.tiles, [table.max_lora_rank((slot,)) for slot, _, _ in cut.tiles])

    def _fill_places(
        self, host: Mapping[str, Array], rows: InputBatch, cut: _Cut, page_size: int
    ) -> None:
        """Fill in where the rows are, in the pages of each kind of layers."""
        positions = _positions(cut)
        _fill(host["positions"], positions, 0)
        decoding, counts = cut.starts[cut.decodes], -(-cut.lengths // page_size)
        serials = _numbers(rows.serials) if rows.serials else None
        tables = {"full": rows.page_tables, "window": rows.window_tables}
        known = {"full": serials, "window": None}  # of a window, tables change where they begin
        for pool in self._attended:
            pages = np.zeros(len(positions), np.int64)  # of each row
            of_pool = tables[pool], counts, known[pool]
            table = self._filled(f"{pool} decode_table", cut.decodes, *of_pool)
            pages[decoding] = table[np.arange(len(decoding)), positions[decoding] // page_size]
            table = self._filled(f"{pool} prefill_table", cut.prefills, *of_pool)
            for row, i in enumerate(cut.prefills.tolist()):
                span = slice(cut.starts[i], cut.starts[i + 1])
                pages[span] = table[row, positions[span] // page_size]
            _fill(host[f"{pool} kv_loc"], pages * page_size + positions % page_size, -1)

    def _filled(
        self,
        name: str,
        sequences: npt.NDArray[np.int64],
        tables: Sequence[Sequence[int]],
        counts: Array,
        serials: Array | None,
    ) -> Array:
        """Return a page table in whose first rows are the pages of some of a step's sequences."""
        rows = self._tables[name]
        own = None if serials is None else serials[sequences]
        rows.fill(tables, sequences, counts[sequences], own)
        return rows.table

    def _new_pages(self, rows: InputBatch) -> Mapping[PoolName, Sequence[int]]:
        """Return the pages of each pool that a step is the first to write to."""
        given = {"full": rows.new_pages, "window": rows.new_window_pages}
        return {pool: given[pool] for pool in self._attended}

    def clear_new_pages(self, rows: InputBatch, cache: KVCache) -> None:
        """Fill the pages with zeros that the step which was sent is the first to write to."""
        pages: dict[str, Tensor | tuple[()]] = {"full": (), "window": ()}
        for pool, numbers in self._new_pages(rows).items():
            pages[pool] = self._arrays.device[f"{pool} new_pages"][: len(numbers)]
        cache.clear(pages["full"], pages["window"])

    def forward_batch(self, rows: InputBatch) -> ForwardBatch:
        """Return the arrays on the device as a batch of `size.samples` samples."""
        arrays, size = self._arrays.device, self.size
        attention: dict[PoolName, AttentionMetadata | StateMetadata] = {
            pool: AttentionMetadata(
                positions=arrays["positions"],
                kv_loc=arrays[f"{pool} kv_loc"],
                decode_rows=arrays["decode_rows"],
                decode_lens=arrays["decode_lens"],
                decode_table=arrays[f"{pool} decode_table"],
                max_splits=size.max_splits,
                prefill_blocks=arrays["blocks"],
                prefill_table=arrays[f"{pool} prefill_table"],
            )
            for pool in self._attended
        }
        if self._has_states:
            attention["state"] = StateMetadata(arrays["runs"], arrays["row_runs"])
        return ForwardBatch(
            token_ids=arrays["token_ids"],
            attention=attention,
            loras=self._loras() if size.max_lora_rank else None,
            embeddings=self._bank.embeddings(rows.runs),
            heads=self._bank.heads(rows.runs),
            sample_index=arrays["samples"],
            sample_rows=rows.sample_rows,
        )

    def _loras(self) -> list[list[LoraMetadata | ExpertLoraMetadata]]:
        table, arrays = self._bank.table, self._arrays.device
        assert table is not None, "a bank for a GPU keeps a table"
        dtype, max_lora_rank = self._bank.dtype, self.size.max_lora_rank
        return [
            [
                *(
                    LoraMetadata(
                        arrays["tiles"],
                        arrays["shares"],
                        table.table(layer, linear),
                        widths,
                        dtype,
                        max_lora_rank,
                    )
                    for linear, widths in enumerate(table.widths)
                ),
                *(
                    ExpertLoraMetadata(
                        arrays["row_slots"],
                        table.expert_table(layer, linear),
                        widths,
                        dtype,
                        max_lora_rank,
                    )
                    for linear, widths in enumerate(table.expert_widths)
                ),
            ]
            for layer in range(self._bank.num_layers)
        ]


def cut_rows(rows: InputBatch, rows_each: int) -> _Cut:
    """Cut a step for the kernels; `rows_each` is what one block of prefill takes."""
    starts, lengths = _numbers(rows.query_starts), _numbers(rows.context_lens)
    are_decodes = np.array(rows.decodes, dtype=np.bool_)
    decodes, prefills = np.flatnonzero(are_decodes), np.flatnonzero(~are_decodes)
    blocks = cut_prefill(
        starts[prefills].tolist(),
        (starts[prefills + 1] - starts[prefills]).tolist(),
        lengths[prefills].tolist(),
        rows_each,
    )
    tiles = cut_tiles([(run.slot, run.start, run.stop) for run in rows.runs])
    return _Cut(starts, lengths, decodes, prefills, blocks, tiles)


def exact_size(rows: InputBatch, cut: _Cut, bank: AdapterBank, page_size: int) -> BatchSize:
    """Return the size of a step and no more."""
    longest = int(cut.lengths[cut.decodes].max(initial=0))
    table = bank.table
    assert table is not None, "a bank for a GPU keeps a table"
    return BatchSize(
        rows=len(rows.token_ids),
        samples=len(rows.sample_rows),
        decodes=len(cut.decodes),
        prefills=len(cut.prefills),
        blocks=len(cut.blocks),
        tiles=len(cut.tiles),
        pages=-(-int(cut.lengths.max()) // page_size),
        max_splits=most_splits(longest) if longest else 0,
        max_lora_rank=table.max_lora_rank([run.slot for run in rows.runs]),
        new_pages=max(len(rows.new_pages), len(rows.new_window_pages)),
    )


def _fill(target: Array, values: Sequence[int] | Array, empty: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = empty


def _numbers(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _positions(cut: _Cut) -> npt.NDArray[np.int64]:
    """Return the position of each row."""
    starts, lengths = cut.starts, cut.lengths
    positions = np.zeros(starts[-1], np.int64)
    positions[starts[cut.decodes]] = lengths[cut.decodes] - 1
    for i in cut.prefills.tolist():
        count = starts[i + 1] - starts[i]
        positions[starts[i] : starts[i + 1]] = np.arange(lengths[i] - count, lengths[i])
    return positions
