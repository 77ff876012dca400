"""The CPU's model runner: all but the embedding is a recorded program of the C library.

The program is recorded when first needed and again, larger, when a step has more rows or larger
adapters than it can take. It is to a CPU what a CUDA graph is to a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.lora import NativeLora
from kernels.native.ops import RankSumOp, number_of
from kernels.native.program import WINDOW_ROWS, RecordedProgram, Step
from worker.cache.kv_cache import KVCache
from worker.distributed.communicator import Communicator
from worker.distributed.shared_group import SharedGroup
from worker.lora.adapter_bank import AdapterBank
from worker.models.decoder import Model
from worker.models.forward_batch import ForwardBatch, InputBatch, cpu_forward_batch
from worker.runners.model_output import ModelOutput
from worker.sampling.row_logits import Argmax

_FIRST_ROWS = 64
_FIRST_SAMPLES = 16
_FIRST_RANK = 16


@dataclass(frozen=True, slots=True)
class _Recording:
    program: RecordedProgram
    max_lora_rank: int  # 0: it has no LoRA
    x: Tensor  # [rows, H] float32, what goes in
    out: tuple[Tensor, Tensor]  # the output and the residual
    # Of this rank, where no adapter changes the head; None: the model has no lm_head.
    logits: Tensor | None  # [samples, V] float32
    argmax: Argmax | None
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _sampled: dict[int, tuple[Tensor, Argmax]] = field(default_factory=dict)

    def input(self, num_rows: int) -> Tensor:
        """Return the first rows of what goes in; the same view each time, as one takes a while."""
        found = self._inputs.get(num_rows)
        if found is None:
            found = self._inputs[num_rows] = self.x[:num_rows]
        return found

    def sampled(self, num_samples: int) -> tuple[Tensor, Argmax]:
        """Return the first rows of the logits, and of their argmax, likewise."""
        found = self._sampled.get(num_samples)
        if found is None:
            assert self.logits is not None and self.argmax is not None, "no lm_head"
            values, ids = (of_all[:num_samples] for of_all in self.argmax)
            found = self._sampled[num_samples] = self.logits[:num_samples], (values, ids)
        return found


class RecordedGroup:
    """A group whose sums are recorded in a program: as ops, where the ranks share memory."""

    def __init__(self, group: Communicator, program: RecordedProgram, library: Library) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._program = program
        self._library = library

    def all_reduce(self, x: Tensor) -> Tensor:
        """Record the sum of the ranks' `x`, which has rows of the program, or pairs, in place."""
        rows_each, rest = divmod(x.shape[0], self._program.num_rows)
        assert rest == 0, "rows of the program"

        def add_up(num_rows: int) -> None:
            rows = x[: num_rows * rows_each]
            total = self._group.all_reduce(rows)
            if total.data_ptr() != rows.data_ptr():
                rows.copy_(total)

        if isinstance(self._group, SharedGroup):
            assert x.dtype in (torch.float32, torch.int32), "in place, as the exchange adds it up"
            assert x.is_contiguous(), "as the exchange adds it up"
            number = number_of(x.dtype)
            op = RankSumOp(self._group.exchange_address, x.data_ptr(), x.shape[1], number)
            # What is asked for again after a halt is the same call, which goes on.
            self._program.add(self._library.op("rank_sum"), op, [x], rows_each, finish=add_up)
        elif self.size > 1:
            self._program.call(add_up)
        return x

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Fail: no layer gathers."""
        raise AssertionError("layers do not gather")

    def close(self) -> None:
        """Do nothing: the group is closed by its owner."""


class NativeRunner:
    """See `worker.runners.model_runner.ModelRunner`."""

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

    def warm_up(self) -> None:
        """See `worker.runners.model_runner.ModelRunner`: nothing is compiled."""

    def run(self, rows: InputBatch, pending: Tensor | None = None) -> ModelOutput:
        """See `worker.runners.model_runner.ModelRunner`."""
        cache, thread_pool = self._cache, self._kernels.thread_pool
        cache.clear(rows.new_pages, rows.new_window_pages)
        thread_pool.wake()
        batch = cpu_forward_batch(
            *(rows, self._bank, cache.page_size, pending, cache.pools), self._kernels.lay_out_rows
        )
        runs = [(run.slot, run.start, run.stop) for run in rows.runs]
        full, window = batch.attention.get("full"), batch.attention.get("window")
        step = Step(
            len(rows.token_ids),
            full,
            runs,
            rows.sample_rows,
            state_runs=batch.attention.get("state", ()),
            window=window,
        )
        recording = self._recording(step, [slot for slot, _, _ in runs])
        self._embed(batch, recording.input(step.num_rows))
        recording.program.run(thread_pool, step)
        hidden = None
        if rows.hidden_rows or batch.heads:
            x, residual = (of_all[: step.num_rows] for of_all in recording.out)
            hidden = self._model.hidden(x, residual, rows.hidden_rows)
            if rows.sample_rows and batch.heads:
                logits = self._model.logits(x, residual, batch)
                of_rows = None if logits is None else self._model.row_logits(logits)
                return ModelOutput(of_rows, hidden)
        if not rows.sample_rows:
            return ModelOutput(None, hidden)
        return ModelOutput(self._model.row_logits(*recording.sampled(step.num_samples)), hidden)

    def _embed(self, batch: ForwardBatch, x: Tensor) -> None:
        """Write the embeddings of a batch into `x` [T, H] float32."""
        whole = self._model.whole_embedding
        if whole is None or batch.embeddings:
            x.copy_(self._model.embed(batch))
        else:  # a step waits for this, and torch takes longer to begin
            self._kernels.look_up(batch.token_ids, *whole, x)

    def _recording(self, step: Step, slots: Sequence[int]) -> _Recording:
        """Return a recording large enough for a step; without adapters it has fewer ops."""
        table = self._bank.table
        assert table is not None, "a bank for native kernels keeps a table"
        wanted = step.num_rows, step.num_samples, table.max_lora_rank(slots)
        recording = self._by_adapters.get(wanted[2] > 0)
        capacity = _FIRST_ROWS, _FIRST_SAMPLES, _FIRST_RANK if wanted[2] else 0
        if recording is not None:
            program = recording.program
            capacity = program.max_rows, program.max_samples, recording.max_lora_rank
            if all(size >= needed for size, needed in zip(capacity, wanted, strict=True)):
                return recording
        rows, samples, lora_rank = map(_grown, capacity, wanted)
        recording = self._by_adapters[lora_rank > 0] = self._record(rows, samples, lora_rank)
        return recording

    def _record(self, max_rows: int, max_samples: int, max_lora_rank: int) -> _Recording:
        program = RecordedProgram(max_rows, max_samples)
        x = torch.empty(max_rows, self._model.hidden_size)
        empty = Step(0)
        with self._kernels.recording(program):
            out = self._model.run_layers(
                x,
                {"full": empty, "window": Step(0, kind=WINDOW_ROWS), "state": empty},
                self._loras(empty, max_lora_rank) if max_lora_rank else None,
                self._cache,
                RecordedGroup(self._group, program, self._kernels.thread_pool.library),
            )
            logits = argmax = None
            if self._model.has_lm_head:
                logits = self._model.head(*map(self._kernels.take_samples, out))
                argmax = self._kernels.argmax(logits)
        return _Recording(program, max_lora_rank, x, out, logits, argmax)

    def _loras(self, step: Step, max_lora_rank: int) -> list[list[NativeLora]]:
        table = self._bank.table
        assert table is not None, "a bank for native kernels keeps a table"
        widths, expert_widths = (
            [torch.tensor(of_linear, dtype=torch.int64) for of_linear in all_widths]
            for all_widths in (table.widths, table.expert_widths)
        )
        dtype = self._bank.dtype
        return [
            [
                *(
                    NativeLora(step, table.table(layer, linear), own, max_lora_rank, dtype)
                    for linear, own in enumerate(widths)
                ),
                *(
                    NativeLora(step, table.expert_table(layer, linear), own, max_lora_rank, dtype)
                    for linear, own in enumerate(expert_widths)
                ),
            ]
            for layer in range(self._bank.num_layers)
        ]


def _grown(capacity: int, wanted: int) -> int:
    """Return `capacity`, doubled until it is enough."""
    while capacity < wanted:
        capacity *= 2
    return capacity
