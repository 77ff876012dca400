"""What runs the rows of a step through the model, and which one does on a device.

Knows nothing of plans or sampling.
"""

from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu_native import NativeKernels
from kernels.dispatch import AnyKernels
from worker.cache.kv_cache import KVCache
from worker.distributed.parallel import Communicator
from worker.lora.adapter_bank import AdapterBank
from worker.models.forward_batch import StepRows
from worker.models.llama import Model
from worker.runners.native_runner import NativeRunner
from worker.runners.torch_runner import CpuRunner
from worker.sampling.row_logits import RowLogits


class Runner(Protocol):
    """What a rank asks of the device."""

    def run(self, rows: StepRows, drawn: Tensor | None = None) -> RowLogits | None:
        """Write K and V of every row and return the logits of the sampled rows.

        The device is asked for it behind all that it was asked for before; nothing is waited for.

        Args:
            rows: of a step.
            drawn: tokens [n] int64 on the device, of the rows that do not know theirs.

        Returns:
            This rank's part, until the next call; None where nothing is sampled.
        """
        ...


def runner_for(
    device: torch.device,
    kernels: AnyKernels,
    group: Communicator,
    model: Model,
    cache: KVCache,
    bank: AdapterBank,
    max_model_len: int,
) -> Runner:
    """Return the runner for a device, on which all of them are."""
    if isinstance(kernels, NativeKernels):
        return NativeRunner(model, cache, bank, kernels, group)
    if device.type != "cuda":
        return CpuRunner(model, cache, bank)
    from worker.runners.gpu_runner import CudaCapture, GpuRunner  # with Triton

    return GpuRunner(model, cache, bank, device, max_model_len=max_model_len, capture=CudaCapture())
