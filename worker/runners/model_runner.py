"""The model runner: what takes the rows of a step through the model on a device.

`TorchRunner` needs torch alone; `worker.runners.native_runner` runs a recorded program of the C
library, `worker.runners.gpu_runner` CUDA graphs.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.native.backend import NativeKernels
from worker.cache.kv_cache import KVCache
from worker.distributed.communicator import Communicator
from worker.lora.adapter_bank import AdapterBank
from worker.models.decoder import Model
from worker.models.forward_batch import InputBatch, cpu_forward_batch
from worker.runners.model_output import ModelOutput
from worker.runners.native_runner import NativeRunner


class ModelRunner(Protocol):
    """What a rank asks of the device."""

    def warm_up(self) -> ModelOutput | None:
        """Do what the first steps would wait for; every rank must, before any plan.

        Returns:
            The output of some batch, to warm the sampler up with; None: there is no need.
        """
        ...

    def run(self, rows: InputBatch, pending: Tensor | None = None) -> ModelOutput:
        """Write K and V of every row and return the logits of the sampled rows.

        It is queued on the device behind everything before it; the host waits for nothing.

        Args:
            rows: of a step.
            pending: tokens [n] int64 on the device, of `rows.pending_rows`.

        Returns:
            This rank's part, until the next call.
        """
        ...


class TorchRunner:
    """Runs a step on a CPU by torch, one op after the other."""

    def __init__(self, model: Model, cache: KVCache, bank: AdapterBank) -> None:
        self._model = model
        self._cache = cache
        self._bank = bank

    def warm_up(self) -> None:
        """See `ModelRunner`: nothing is compiled."""

    def run(self, rows: InputBatch, pending: Tensor | None = None) -> ModelOutput:
        """See `ModelRunner`."""
        cache = self._cache
        cache.clear(rows.new_pages, rows.new_window_pages)
        batch = cpu_forward_batch(rows, self._bank, cache.page_size, pending, cache.pools)
        segments = self._bank.segments(rows.runs) or None
        logits, hidden = self._model.forward(
            replace(batch, loras=segments), self._cache, rows.hidden_rows
        )
        row_logits = None if logits is None else self._model.row_logits(logits)
        return ModelOutput(row_logits, hidden)


def model_runner_for(
    device: torch.device,
    kernels: AnyKernels,
    group: Communicator,
    model: Model,
    cache: KVCache,
    bank: AdapterBank,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_lora_rank: int = 64,
) -> ModelRunner:
    """Return the model runner for a device, on which all the arguments are.

    Args:
        device: a CPU or a GPU.
        kernels: for it.
        group: all ranks of the model.
        model: this rank's.
        cache: the pages.
        bank: the adapters.
        max_model_len: positions that a sequence may have.
        max_num_batched_tokens: rows that a step may have.
        max_num_seqs: sequences that a step may have.
        max_lora_rank: that a module of an adapter may have.
    """
    if isinstance(kernels, NativeKernels):
        return NativeRunner(model, cache, bank, kernels, group)
    if device.type != "cuda":
        return TorchRunner(model, cache, bank)
    from worker.runners.gpu_runner import CudaCapture, GpuRunner  # with Triton

    return GpuRunner(
        model,
        cache,
        bank,
        device,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_lora_rank=max_lora_rank,
        capture=CudaCapture(),
    )
