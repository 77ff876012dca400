"""Which functions a forward pass is made of, chosen once by the device that it runs on.

Triton is imported only if there is a GPU.
"""

import torch

from kernels.interface import AnyKernels
from kernels.native.backend import NativeKernels
from kernels.native.library import native_library
from kernels.native.program import ThreadPool
from kernels.torch_backend import CpuKernels


def kernels_for(
    device: torch.device, deterministic: bool = False, tp: int = 1, num_threads: int = 1
) -> AnyKernels:
    """Return the functions for a device.

    Args:
        device: a CPU or a CUDA device.
        deterministic: matrix products on a GPU give a row bits that do not depend on its batch;
            on a CPU they never do.
        tp: ranks that share the model.
        num_threads: of this rank, on a CPU.
    """
    if device.type != "cuda":
        library = native_library()
        return CpuKernels() if library is None else NativeKernels(ThreadPool(library, num_threads))
    from kernels.gpu.backend import GpuKernels

    return GpuKernels(deterministic, tp)
