"""One step's rows, as host lists and as tensors on a device. Knows nothing of plans or layers.

Shapes: T rows, S sampled rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.lora.adapter_bank import AdaptedRows, SlotRows
from worker.lora.adapter_weights import EmbeddingForm, HeadForm


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step computes, as host lists; rows of one sequence stand together."""

    token_ids: list[int]  # T; of `drawn_rows` they say nothing
    query_starts: list[int]  # of each sequence, its first row; and T at the end
    context_lens: list[int]  # of each sequence, its positions, the new rows included
    page_tables: list[list[int]]  # of each sequence, pages that cover its context
    decodes: list[bool]  # of each sequence, whether it goes on by one token that was drawn
    runs: tuple[SlotRows, ...]  # rows of each adapter; rows in none are the base model's
    sample_rows: list[int]  # S: the last row of each chunk that samples, in plan order
    drawn_rows: Sequence[int] = ()  # rows whose token is on the device alone, in plan order


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """What the forward pass works on."""

    token_ids: Tensor  # [T] int64
    attention: Any  # where K and V lie, as the kernels want it
    loras: Sequence[Sequence[Any]] | None  # by layer and fused linear, likewise; None: no adapters
    embeddings: Sequence[AdaptedRows[EmbeddingForm]]
    heads: Sequence[AdaptedRows[HeadForm]]
    sample_index: Tensor  # [S] int64, sample_rows on the device
    sample_rows: Sequence[int]
