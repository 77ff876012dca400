"""Programmatic dependent launch: a kernel's programs start while the kernel before it still ends.

What a program does before `wait_for_prior` hides behind that end, and so does most of its own
launch. It may read there what was on the device before the step's first kernel: weights, and what
the host sent. It may write nothing. Every program waits, also one that has nothing to do: a kernel
none of whose programs waited could end before the one before it, and what comes next wait for the
wrong one. Kernels that are launched plainly may stand anywhere between such.

The idea is CUDA's ("Programmatic Dependent Launch and Synchronization" of its programming guide);
GPUs have it from Hopper on.
"""

from functools import cache

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from kernels.gpu.constants import LAUNCH_OPTIONS


@cache  # asking Triton for the GPU takes longer than a launch
def dependent_options() -> dict[str, bool]:
    """Return what the launch of a kernel says that calls `wait_for_prior`."""
    return LAUNCH_OPTIONS | {"launch_pdl": cuda_capability_geq(9)}


@triton.jit
def start_dependents():
    """Let the next kernel's programs start as soon as all programs of this one have."""
    if cuda_capability_geq(9):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_prior():
    """Wait until all kernels before are done and what they wrote can be read."""
    if cuda_capability_geq(9):
        tl.extra.cuda.gdc_wait()
