"""The rows of one step: as host lists (`InputBatch`) and as the model takes them (`ForwardBatch`).

A row is one token of one sequence. Shapes: T rows, S sampled rows, R rows whose hidden states are
wanted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, LayOut, lay_out_rows
from kernels.recurrent.state_runs import state_runs
from worker.lora.adapter_bank import AdaptedRows, AdapterBank, SlotRows
from worker.lora.adapter_weights import AdapterEmbedding, AdapterHead
from worker.pools import PoolName


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What a step computes, as lists on the host; rows of one sequence stand together."""

    token_ids: list[int]  # T; those of `pending_rows` mean nothing
    query_starts: list[int]  # of each sequence, its first row; and T at the end
    context_lens: list[int]  # of each sequence, its positions, the new rows included
    page_tables: Sequence[Sequence[int]]  # of each sequence, pages that cover its context
    decodes: list[bool]  # of each sequence, whether its one row is an output token
    runs: tuple[SlotRows, ...]  # rows of each adapter; rows in none are the base model's
    sample_rows: list[int]  # S: the last row of each chunk that draws a token, in plan order
    pending_rows: Sequence[int] = ()  # rows whose token only the device knows, in plan order
    hidden_rows: Sequence[int] = ()  # R: rows whose final hidden states are wanted, in plan order
    # Page tables of layers with pages of their own, if there are any. For pages that no row of the
    # sequence sees stands another one that is its own.
    window_tables: Sequence[Sequence[int]] = ()
    state_pages: Sequence[int] = ()  # of each sequence, if there are layers with states
    # Of each sequence a number of its own, or none of any: its page table has only grown since.
    serials: Sequence[int] = ()
    # Pages that the step is the first to write to, of full and window layers: filled with zeros.
    new_pages: Sequence[int] = ()
    new_window_pages: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """What the forward pass takes, on its device."""

    token_ids: Tensor  # [T] int64
    attention: Mapping[PoolName, Any]  # where K and V, or states, lie, as the kernels want it
    loras: Sequence[Sequence[Any]] | None  # by layer and fused linear, likewise; None: no adapters
    embeddings: Sequence[AdaptedRows[AdapterEmbedding]]
    heads: Sequence[AdaptedRows[AdapterHead]]
    sample_index: Tensor  # [S] int64, sample_rows on the device
    sample_rows: Sequence[int]


def cpu_forward_batch(
    rows: InputBatch,
    bank: AdapterBank,
    page_size: int,
    pending: Tensor | None = None,
    pools: Sequence[PoolName] = ("full",),
    lay_out: LayOut = lay_out_rows,
) -> ForwardBatch:
    """Return the rows as tensors on the CPU, with `loras` left out.

    `pending` are the tokens [n] int64 of `rows.pending_rows`, `pools` those that layers have,
    `lay_out` what fills the arrays of their pages.
    """
    tables = {"full": rows.page_tables, "window": rows.window_tables}
    starts, lengths = rows.query_starts, rows.context_lens
    attention: dict[PoolName, Any] = {
        pool: AttentionBatch.build(starts, lengths, tables[pool], page_size, lay_out)
        for pool in pools
        if pool != "state"
    }
    if "state" in pools:
        attention["state"] = state_runs(starts, lengths, rows.state_pages)
    token_ids = np.array(rows.token_ids, np.int64)
    if pending is not None:
        token_ids[list(rows.pending_rows)] = pending.numpy()
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids),
        attention=attention,
        loras=None,
        embeddings=bank.embeddings(rows.runs),
        heads=bank.heads(rows.runs),
        sample_index=torch.from_numpy(np.array(rows.sample_rows, np.int64)),
        sample_rows=rows.sample_rows,
    )
