"""Runs the rows of a step through the model on a CPU, all but its embedding from a tape.

Owns the tape: it is made when first needed and made anew, larger, when a step has more rows or
larger adapters than it has room for. Knows nothing of plans or sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu_native import NativeKernels, NativeLora
from kernels.native.library import Library
from kernels.native.ops import RankSumOp
from kernels.native.program import Step
from kernels.native.recorded_program import Tape
from worker.cache.kv_cache import KVCache
from worker.distributed.parallel import Communicator, SharedGroup
from worker.lora.adapter_bank import AdapterBank
from worker.lora.shard import FUSED_MODULES
from worker.models.forward_batch import StepRows
from worker.models.llama import Model
from worker.runners.torch_runner import cpu_batch
from worker.sampling.row_logits import Best, RowLogits

_FIRST_ROWS = 64
_FIRST_SAMPLES = 16
_FIRST_RANK = 16


@dataclass(frozen=True, slots=True)
class _Recording:
    tape: Tape
    max_rank: int  # of adapters; 0: it has no LoRA
    x: Tensor  # [rows, H] float32, what goes in
    out: tuple[Tensor, Tensor]  # the output and the residual
    # Of this rank, where no adapter changes the head:
    logits: Tensor  # [samples, V] float32
    best: Best


class RecordedGroup:
    """Puts the sums of a group on a tape: as ops, where the ranks share memory."""

    def __init__(self, group: Communicator, tape: Tape, library: Library) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._tape = tape
        self._library = library

    def all_reduce(self, x: Tensor) -> Tensor:
        """Note the sum of the ranks' `x`, which takes its place."""

        def add_up(num_rows: int) -> None:
            rows = x[:num_rows]
            total = self._group.all_reduce(rows)
            if total.data_ptr() != rows.data_ptr():
                rows.copy_(total)

        if isinstance(self._group, SharedGroup):
            assert x.dtype == torch.float32 and x.is_contiguous(), "as the exchange adds it up"
            op = RankSumOp(self._group.exchange_address, x.data_ptr(), x.shape[1])
            # What is asked for again after a halt is the same call, which goes on.
            self._tape.add(self._library.op("rank_sum"), op, [x], finish=add_up)
        elif self.size > 1:
            self._tape.call(add_up)
        return x

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Nothing in a layer asks for it."""
        raise AssertionError("layers do not gather")

    def close(self) -> None:
        """Nothing is open."""


class NativeRunner:
    """See `worker.runners.runner.Runner`."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        bank: AdapterBank,
        kernels: NativeKernels,
        group: Communicator,
    ) -> None:
        self._model = model
        self._cache = cache
        self._bank = bank
        self._kernels = kernels
        self._group = group
        self._by_adapters: dict[bool, _Recording] = {}

    def run(self, rows: StepRows, drawn: Tensor | None = None) -> RowLogits | None:
        """See `worker.runners.runner.Runner`."""
        crew = self._kernels.crew
        crew.rouse()
        batch = cpu_batch(rows, self._bank, self._cache.page_size, drawn)
        runs = [(run.slot, run.start, run.stop) for run in rows.runs]
        step = Step(len(rows.token_ids), batch.attention, runs, rows.sample_rows)
        recording = self._recording(step, [slot for slot, _, _ in runs])
        recording.x[: step.num_rows].copy_(self._model.embed(batch))
        recording.tape.run(crew, step)
        if not rows.sample_rows:
            return None
        if batch.heads:
            x, residual = recording.out
            logits = self._model.logits(x[: step.num_rows], residual[: step.num_rows], batch)
            return None if logits is None else self._model.row_logits(logits)
        logits, values, ids = (
            of_all[: step.num_samples] for of_all in (recording.logits, *recording.best)
        )
        return self._model.row_logits(logits, (values, ids))

    def _recording(self, step: Step, slots: Sequence[int]) -> _Recording:
        """Return a recording with room for a step; one without adapters has fewer ops."""
        table = self._bank.table
        assert table is not None, "a bank for native kernels keeps a table"
        wanted = step.num_rows, step.num_samples, table.max_rank(slots)
        found = self._by_adapters.get(wanted[2] > 0)
        room = _FIRST_ROWS, _FIRST_SAMPLES, _FIRST_RANK if wanted[2] else 0
        if found is not None:
            room = found.tape.max_rows, found.tape.max_samples, found.max_rank
            if all(there >= asked for there, asked in zip(room, wanted, strict=True)):
                return found
        rows, samples, rank = map(_grown, room, wanted)
        made = self._by_adapters[rank > 0] = self._record(rows, samples, rank)
        return made

    def _record(self, max_rows: int, max_samples: int, max_rank: int) -> _Recording:
        tape = Tape(max_rows, max_samples)
        x = torch.empty(max_rows, self._model.hidden_size)
        nobody = Step(0)
        with self._kernels.recording(tape):
            out = self._model.decode(
                x,
                nobody,
                self._loras(nobody, max_rank) if max_rank else None,
                self._cache,
                RecordedGroup(self._group, tape, self._kernels.crew.library),
            )
            logits = self._model.head(*map(self._kernels.take_samples, out))
            best = self._kernels.best(logits)
        return _Recording(tape, max_rank, x, out, logits, best)

    def _loras(self, step: Step, max_rank: int) -> list[list[NativeLora]]:
        table = self._bank.table
        assert table is not None, "a bank for native kernels keeps a table"
        widths = [torch.tensor(of_linear) for of_linear in table.widths]
        return [
            [
                NativeLora(
                    step, table.table(layer, linear), widths[linear], max_rank, self._bank.dtype
                )
                for linear in range(len(FUSED_MODULES))
            ]
            for layer in range(self._bank.num_layers)
        ]


def _grown(room: int, wanted: int) -> int:
    """Return `room`, doubled until there is enough."""
    while room < wanted:
        room *= 2
    return room
