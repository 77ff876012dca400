"""Programs of C functions: ops on fixed memory that one call runs one after the other.

A step and a row of ops are laid out as in csrc/runtime/thread_pool.h. The tensors that an op points
into live as long as the program.

A model of 30 layers is a few hundred ops, each of some microseconds; Python takes as long for a
call as C for its work. So Python goes through the layers once, and a recorded program is what is
left: a row of programs. Where something else has to be done between two ops, such as a sum over
ranks, a new program begins. The memory that ops write to belongs to the recorded program.

Shapes: T rows, S sequences.
"""

import ctypes
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch
from kernels.native.huge_pages import HugePages
from kernels.native.library import Library, OpFunction, StepFields
from kernels.recurrent.state_runs import StateRun

Call = Callable[[int], None]  # given the rows of the step

ROWS, SAMPLES, WINDOW_ROWS = range(3)  # what an op works on, and which of a step's fields it sees
_DONE, _HALTED = 0, 2  # as csrc/runtime/thread_pool.c has them


class _Entry(ctypes.Structure):
    """`struct entry` of runtime/thread_pool.h."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("run", "op")),
        *((n, ctypes.c_int64) for n in ("kind", "rows_each", "is_joined")),
    ]


class Step:
    """What a program works on besides its own memory; keeps what it points to alive."""

    def __init__(
        self,
        num_rows: int,
        attention: AttentionBatch | None = None,
        runs: Sequence[tuple[int, int, int]] = (),
        samples: Sequence[int] = (),
        state_runs: Sequence[StateRun] = (),
        window: AttentionBatch | None = None,
        kind: int = ROWS,
    ) -> None:
        """Describe a step.

        Args:
            num_rows: T.
            attention: where the rows' sequences lie, for ops that ask.
            runs: (slot, start, stop) of rows that use an adapter, in row order.
            samples: rows for the ops of samples.
            state_runs: rows of each sequence that has a state, and its page.
            window: what `attention` is, for ops of layers with pages of their own.
            kind: what an op that is recorded with this step will work on, ROWS or WINDOW_ROWS.
        """
        self.kind = kind
        self._attention = attention, window
        self._runs = array("q", [number for run in runs for number in run])
        self._samples = array("q", samples)
        rows, window_rows = StepFields(num_rows=num_rows), StepFields(num_rows=num_rows)
        rows.num_runs, rows.runs = len(runs), self._runs.buffer_info()[0]
        for fields, batch in ((rows, attention), (window_rows, window)):
            if batch is None:
                continue
            arrays = batch.arrays
            fields.num_sequences, fields.max_pages = arrays.page_table.shape
            fields.positions = arrays.positions.ctypes.data
            fields.kv_loc = arrays.kv_loc.ctypes.data
            fields.sequences = arrays.sequences.ctypes.data
            fields.page_table = arrays.page_table.ctypes.data
        numbers = [(run.start, run.stop, run.page, run.is_new) for run in state_runs]
        self._state_runs = array("q", [number for run in numbers for number in run])
        rows.num_state_runs = len(state_runs)
        rows.state_runs = self._state_runs.buffer_info()[0]
        sampled = StepFields(num_rows=len(samples))
        sampled.positions = self._samples.buffer_info()[0]
        self.num_rows, self.num_samples = num_rows, len(samples)
        self.fields = (StepFields * 3)(rows, sampled, window_rows)


class ThreadPool:
    """Threads that run programs together; the calling thread is one of them."""

    def __init__(self, library: Library, num_threads: int) -> None:
        """Start the other threads.

        Raises:
            MemoryError: if there can be no such threads.
        """
        assert num_threads > 0, f"{num_threads} threads"
        self.num_threads = num_threads
        self.library = library
        self.seconds: defaultdict[str, float] | None = None  # by op, if somebody wants to know
        address = library.thread_pool_new(num_threads)
        if address is None:
            raise MemoryError(f"no memory for {num_threads} threads")
        self._address = address
        free = weakref.finalize(self, library.thread_pool_free, address)
        # At the interpreter's end a daemon thread may be running a program: who runs one keeps the
        # pool alive, but not that late. The process takes threads and memory with it.
        free.atexit = False

    def wake(self) -> None:
        """Wake the other threads for a program that will be run in a moment."""
        self.library.thread_pool_wake(self._address)

    def run(self, program: "Program", step: Step, *, alone: bool = False) -> None:
        """Run a program on all threads, or on the caller's alone; one caller at a time.

        Raises:
            MemoryError: no room for the program's scratch memory in each thread.
        """
        entries, count = program.entries()
        times = None if self.seconds is None else (ctypes.c_int64 * count)()
        scratch = program.scratch_bytes
        next_entry = ctypes.c_int64(0)
        arguments = self._address, step.fields, entries, count, scratch, alone, times, next_entry
        while (state := self.library.run(*arguments)) == _HALTED:
            program.finish(next_entry.value - 1, step)
        if state != _DONE:
            raise MemoryError(f"{scratch} bytes of scratch memory for each thread")
        if self.seconds is not None and times is not None:
            for name, nanoseconds in zip(program.names, times, strict=True):
                self.seconds[name] += nanoseconds * 1e-9


class Program:
    """A row of ops, empty at first."""

    def __init__(self) -> None:
        self.scratch_bytes = 0
        self._ops: list[tuple[OpFunction, ctypes.Structure, int, int, bool]] = []
        self._finish: dict[int, Call] = {}
        self._tensors: list[Tensor] = []
        self._entries: ctypes.Array[_Entry] | None = None

    @property
    def names(self) -> list[str]:
        """Return what each op is called."""
        return [function.name for function, *_ in self._ops]

    def add(
        self,
        function: OpFunction,
        op: ctypes.Structure,
        tensors: Sequence[Tensor | None],
        *,
        kind: int = ROWS,
        rows_each: int = 1,
        finish: Call | None = None,
        is_joined: bool = False,
    ) -> None:
        """Append an op.

        Args:
            function: what runs it, and says how much scratch memory it needs.
            op: its struct, fixed from now on.
            tensors: what the struct points into.
            kind: what it works on, ROWS, SAMPLES or WINDOW_ROWS.
            rows_each: rows of its tensors for each of these.
            finish: does the rest of an op that has halted the program, which then goes on.
            is_joined: threads go on to the next op without waiting for each other; neither reads
                or writes what the other writes. Another op has to follow.
        """
        assert not is_joined or finish is None, "an op that halts is not joined to the next"
        assert not (is_joined and self._ops and self._ops[-1][-1]), "no three ops are joined"
        if finish is not None:
            self._finish[len(self._ops)] = finish
        self._ops.append((function, op, kind, rows_each, is_joined))
        self._tensors += [tensor for tensor in tensors if tensor is not None]
        self.scratch_bytes = max(self.scratch_bytes, function.scratch_bytes(op))
        self._entries = None

    def finish(self, index: int, step: Step) -> None:
        """Do the rest of an op that has halted the program."""
        assert index in self._finish, f"op {index}, {self.names[index]}, halts and has no `finish`"
        self._finish[index](step.num_rows)

    def entries(self) -> tuple[ctypes.Array[_Entry], int]:
        """Return the ops as C wants them, and how many there are."""
        assert not (self._ops and self._ops[-1][-1]), "the last op is joined to another"
        if self._entries is None:
            self._entries = (_Entry * len(self._ops))(
                *(_Entry(one.address, ctypes.addressof(op), *rest) for one, op, *rest in self._ops)
            )
        return self._entries, len(self._ops)


class RecordedProgram:
    """Ops on up to `max_rows` rows, then on up to `max_samples` of them, and calls, in order."""

    def __init__(self, max_rows: int, max_samples: int = 0) -> None:
        self.max_rows = max_rows
        self.max_samples = max_samples
        self._of_samples = False
        self._parts: list[Program | Call] = [Program()]
        self._buffers: dict[tuple[str, bool, tuple[int, ...], torch.dtype], Tensor] = {}
        self._memory = HugePages()

    @property
    def num_rows(self) -> int:
        """Rows of the tensors of what is being recorded."""
        return self.max_samples if self._of_samples else self.max_rows

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory [num_rows, *shape] that has this name; whoever asks may write it."""
        key = name, self._of_samples, shape, dtype
        if key not in self._buffers:
            self._buffers[key] = self._memory.empty((self.num_rows, *shape), dtype)
        return self._buffers[key]

    def go_on_with_samples(self) -> None:
        """Work on the rows that are sampled from here on."""
        self._of_samples = True

    def add(
        self,
        function: OpFunction,
        op: ctypes.Structure,
        tensors: Sequence[Tensor | None],
        rows_each: int = 1,
        finish: Call | None = None,
        kind: int = ROWS,
        *,
        is_joined: bool = False,
    ) -> None:
        """Append an op; the arguments are those of `Program.add`."""
        last = self._parts[-1]
        if not isinstance(last, Program):
            last = Program()
            self._parts.append(last)
        kind = SAMPLES if self._of_samples else kind
        last.add(
            *(function, op, tensors),
            kind=kind,
            rows_each=rows_each,
            finish=finish,
            is_joined=is_joined,
        )

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
