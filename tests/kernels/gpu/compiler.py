"""Compiles kernels for GPUs that are not there, by the launches that would run them.

Inside `compiling`, launching a kernel compiles it as the launch would, with the same specialisation
by its arguments, and notes what came out instead of running it. Needs ptxas and the disassembler
that come with Triton, and no driver.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.gpu.dependent_launch import dependent_options

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes one block may use
REGISTERS_PER_SM = 65536
WARP = 32
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# The tensor cores' instructions: of Ampere, of Hopper's warp groups, and of Blackwell.
_MATRIX = re.compile(r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|IMMA|DMMA)\b")
_GLOBAL_LOAD = re.compile(r"\b(?:LDG|LDGSTS)((?:\.\w+)+)")


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled for one launch."""

    name: str
    architecture: int
    num_warps: int
    constants: dict[str, Any]
    shared_bytes: int  # of one block
    registers: int  # of one thread
    stack_bytes: int  # of one thread: what was spilled
    is_dependent: bool  # its programs start before the kernel before it is done
    cubin: bytes

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that an SM can hold at once, by registers and shared memory."""
        per_thread = -(-self.registers // 8) * 8  # given out in eights
        by_registers = REGISTERS_PER_SM // (per_thread * self.num_warps * WARP)
        by_shared = (SHARED_LIMIT[self.architecture] + 1024) // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, 64 // self.num_warps)

    @cached_property
    def sass(self) -> str:
        """The machine code, as text."""
        return _on_file(self.cubin, "cuobjdump", "-sass")

    @property
    def num_matrix_instructions(self) -> int:
        return len(_MATRIX.findall(self.sass))

    @property
    def load_bytes(self) -> dict[int, int]:
        """How many load instructions of each width, in bytes of one thread, read global memory.

        Bulk copies of the tensor memory accelerator do not count.
        """
        counts: dict[int, int] = {}
        for suffixes in _GLOBAL_LOAD.findall(self.sass):
            parts = suffixes.split(".")
            width = 16 if "128" in parts else 8 if "64" in parts else 4
            width = 2 if {"U16", "S16"} & set(parts) else 1 if {"U8", "S8"} & set(parts) else width
            counts[width] = counts.get(width, 0) + 1
        return counts


class _Driver:
    """Stands for a GPU of some architecture."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def set_gpu(architecture: int) -> None:
    """Let Triton and the kernels take this architecture for the GPU's."""
    driver.set_active(_Driver(architecture))
    dependent_options.cache_clear()


@contextmanager
def compiling(architecture: int) -> Iterator[list[Compiled]]:
    """Compile what is launched inside; give what came out, in order of the launches."""
    found: list[Compiled] = []
    forgotten: set[int] = set()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if id(self) not in forgotten:
            # Triton keeps what it compiled by device, and all these GPUs are device 0.
            self.device_caches.clear()
            forgotten.add(id(self))
        found.append(_compile(self, architecture, original, arguments, options))

    original = JITFunction.run
    set_gpu(architecture)
    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = original


def _compile(
    kernel: Any,
    architecture: int,
    run: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Compiled:
    compiled = run(kernel, *arguments, grid=(1,), warmup=True, **options)
    cubin = compiled.asm["cubin"]
    usage = re.search(
        r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", _on_file(cubin, "cuobjdump", "-res-usage")
    )
    assert usage is not None, "cuobjdump tells what a kernel uses"
    registers, stack, _ = map(int, usage.groups())
    constants = {key: value for key, value in options.items() if key in kernel.arg_names}
    return Compiled(
        kernel.fn.__name__,
        architecture,
        compiled.metadata.num_warps,
        constants,
        compiled.metadata.shared,
        registers,
        stack,
        compiled.metadata.launch_pdl,
        cubin,
    )


def _on_file(cubin: bytes, tool: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / tool), *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
