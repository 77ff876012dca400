"""Runs the rows of a step through the model on a CPU, and says what a runner is.

Owns the way from host lists to a device batch. Knows nothing of plans or sampling.
"""

from typing import Protocol

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch
from worker.adapter_bank import AdapterBank
from worker.kv_cache import KVCache
from worker.model import Model
from worker.rows import DeviceBatch, StepRows


class Runner(Protocol):
    """What a rank asks of the device."""

    def run(self, rows: StepRows) -> Tensor | None:
        """Write K and V of every row and return the logits of the sampled rows.

        Returns:
            [S, vocabulary] float32 on rank 0; None on other ranks and where nothing is sampled.
        """
        ...


class CpuRunner:
    """Runs every step by itself."""

    def __init__(self, model: Model, cache: KVCache, bank: AdapterBank) -> None:
        self._model = model
        self._cache = cache
        self._bank = bank

    def run(self, rows: StepRows) -> Tensor | None:
        """See `Runner`."""
        return self._model.forward(self.batch(rows), self._cache)

    def batch(self, rows: StepRows) -> DeviceBatch:
        """Return the rows as tensors."""
        return DeviceBatch(
            token_ids=torch.tensor(rows.token_ids, dtype=torch.int64),
            attention=AttentionBatch.build(
                rows.query_starts, rows.context_lens, rows.page_tables, self._cache.page_size
            ),
            loras=self._bank.segments(rows.runs) or None,
            embeddings=self._bank.embeddings(rows.runs),
            heads=self._bank.heads(rows.runs),
            sample_index=torch.tensor(rows.sample_rows, dtype=torch.int64),
            sample_rows=rows.sample_rows,
        )


def runner_for(
    device: torch.device, model: Model, cache: KVCache, bank: AdapterBank, max_model_len: int
) -> Runner:
    """Return the runner for a device, on which all of them are."""
    if device.type != "cuda":
        return CpuRunner(model, cache, bank)
    from worker.gpu_runner import CudaCapture, GpuRunner  # with Triton

    return GpuRunner(model, cache, bank, device, max_model_len=max_model_len, capture=CudaCapture())
