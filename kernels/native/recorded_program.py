"""What a forward pass does on memory of its own, recorded once so that it can be run again.

A model of 30 layers is a few hundred ops, each of some microseconds; Python takes as long for a
call as C for its work. So Python goes through the layers once, and a row of programs is what is
left. Where something else has to be done between two ops, such as a sum over ranks, a new program
begins. The memory that ops write to belongs to the recorded program.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.native.library import OpFunction
from kernels.native.program import Call, Program, Step, ThreadPool


class RecordedProgram:
    """Ops on up to `max_rows` rows, then on up to `max_samples` of them, and calls, in order."""

    def __init__(self, max_rows: int, max_samples: int = 0) -> None:
        self.max_rows = max_rows
        self.max_samples = max_samples
        self._of_samples = False
        self._parts: list[Program | Call] = [Program()]
        self._buffers: dict[tuple[str, bool, tuple[int, ...], torch.dtype], Tensor] = {}

    @property
    def num_rows(self) -> int:
        """Rows of the tensors of what is being recorded."""
        return self.max_samples if self._of_samples else self.max_rows

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory [num_rows, *shape] that has this name; whoever asks may write it."""
        key = name, self._of_samples, shape, dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty((self.num_rows, *shape), dtype=dtype)
        return self._buffers[key]

    def go_on_with_samples(self) -> None:
        """Work on the rows that are sampled from here on."""
        self._of_samples = True

    def add(
        self,
        function: OpFunction,
        op: ctypes.Structure,
        tensors: Sequence[Tensor | None],
        finish: Call | None = None,
    ) -> None:
        """Append an op; the arguments are those of `Program.add`."""
        last = self._parts[-1]
        if not isinstance(last, Program):
            last = Program()
            self._parts.append(last)
        last.add(function, op, tensors, of_samples=self._of_samples, finish=finish)

    def call(self, function: Call) -> None:
        """Append something that is not an op."""
        self._parts.append(function)

    def run(self, thread_pool: ThreadPool, step: Step) -> None:
        """Do it all, on all threads.

        Raises:
            MemoryError: no room for a program's scratch memory in each thread.
        """
        num_rows = step.num_rows
        assert num_rows <= self.max_rows, f"{num_rows} rows in a program for {self.max_rows}"
        assert step.num_samples <= self.max_samples, f"{step.num_samples} samples"
        for part in self._parts:
            if isinstance(part, Program):
                thread_pool.run(part, step)
            else:
                part(num_rows)
