"""Runs the rows of a step through the model on a CPU by torch, one op after the other.

Owns the way from host lists to a batch on a CPU. Knows nothing of plans or sampling.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch
from worker.cache.kv_cache import KVCache
from worker.lora.adapter_bank import AdapterBank
from worker.models.forward_batch import DeviceBatch, StepRows
from worker.models.llama import Model
from worker.sampling.row_logits import RowLogits


class CpuRunner:
    """Runs every step by itself."""

    def __init__(self, model: Model, cache: KVCache, bank: AdapterBank) -> None:
        self._model = model
        self._cache = cache
        self._bank = bank

    def run(self, rows: StepRows, drawn: Tensor | None = None) -> RowLogits | None:
        """See `Runner`."""
        batch = cpu_batch(rows, self._bank, self._cache.page_size, drawn)
        segments = self._bank.segments(rows.runs) or None
        logits = self._model.forward(replace(batch, loras=segments), self._cache)
        return None if logits is None else self._model.row_logits(logits)


def cpu_batch(
    rows: StepRows, bank: AdapterBank, page_size: int, drawn: Tensor | None = None
) -> DeviceBatch:
    """Return the rows as tensors, with no LoRA of a layer."""
    token_ids = torch.tensor(rows.token_ids, dtype=torch.int64)
    if drawn is not None:
        token_ids[list(rows.drawn_rows)] = drawn
    return DeviceBatch(
        token_ids=token_ids,
        attention=AttentionBatch.build(
            rows.query_starts, rows.context_lens, rows.page_tables, page_size
        ),
        loras=None,
        embeddings=bank.embeddings(rows.runs),
        heads=bank.heads(rows.runs),
        sample_index=torch.tensor(rows.sample_rows, dtype=torch.int64),
        sample_rows=rows.sample_rows,
    )
