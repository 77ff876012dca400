"""What runs an op of the C library at once, or records it in a program to be run later."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels.native.program import ROWS, Program, RecordedProgram, Step, ThreadPool
from kernels.torch_backend import CpuKernels

_LINE = 16  # float32 of a line of a cache
_CROWDED = 256  # float32


class OpRunner(CpuKernels):
    """The ground that the functions of kernels.native stand on.

    While a program is being recorded, tensors have its number of rows and hold nothing yet, and a
    step that is passed along is not looked at. Tensors of pairs have a multiple of that number.
    """

    def __init__(self, thread_pool: ThreadPool) -> None:
        self.thread_pool = thread_pool
        self._recorded: RecordedProgram | None = None

    @contextmanager
    def recording(self, program: RecordedProgram) -> Iterator[None]:
        """Record what is asked for in a program instead of doing it."""
        assert self._recorded is None, "one program at a time"
        self._recorded = program
        try:
            yield
        finally:
            self._recorded = None

    def _rows_each(self, num_rows: int) -> int:
        """Return how many rows a tensor of so many has for each row of the step it is run with."""
        if self._recorded is None or num_rows == 0:
            return 1
        rows_each, rest = divmod(num_rows, self._recorded.num_rows)
        assert rest == 0, "what is recorded has the program's rows, or as many for each of them"
        return rows_each

    def _out(self, name: str, num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return where an op may write."""
        if self._recorded is None:
            return torch.empty((num_rows, *shape), dtype=dtype)
        rows_each = self._rows_each(num_rows)
        if rows_each == 1:
            return self._recorded.buffer(name, shape, dtype)
        return self._recorded.buffer(name, (rows_each, *shape), dtype).flatten(0, 1)

    def _rows_apart(self, name: str, num_rows: int, width: int) -> Tensor:
        """Return where an op may write rows [num_rows, width] of float32, many at a time.

        A multiple of 1 KB apart they would share few sets of a first cache, and push each other
        out: they are a line further apart then.
        """
        is_crowded = width > 0 and width % _CROWDED == 0
        return self._out(name, num_rows, (width + is_crowded * _LINE,), torch.float32)[:, :width]

    def _do(
        self,
        name: str,
        op: ctypes.Structure,
        step: Step | int,
        tensors: Sequence[Tensor | None],
        *,
        alone: bool = False,
        is_joined: bool = False,
    ) -> None:
        """Run an op at once on a step, or on so many rows, or record it.

        What is recorded next is then joined to it, if it `is_joined`; see `Program.add`.
        """
        function = self.thread_pool.library.op(name)
        if self._recorded is not None:
            rows_each = 1 if isinstance(step, Step) else self._rows_each(step)
            kind = step.kind if isinstance(step, Step) else ROWS
            self._recorded.add(function, op, tensors, rows_each, kind=kind, is_joined=is_joined)
            return
        program = Program()
        program.add(function, op, tensors)
        self.thread_pool.run(program, step if isinstance(step, Step) else Step(step), alone=alone)


def at(tensor: Tensor | None) -> int | None:
    """Return where a tensor lies, None for none."""
    return None if tensor is None else tensor.data_ptr()


def is_bf16(tensor: Tensor) -> bool:
    """Tell how wide a tensor's elements are."""
    return tensor.dtype == torch.bfloat16
