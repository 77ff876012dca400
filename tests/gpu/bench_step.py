"""Times of whole steps at the shape of Llama-3.1-8B through the product's own runner.

A step is all that a rank does for its rows: lists to arrays, arrays to the device, the forward
pass, the best token of each row and its way back. `ms` is what passes on the device between the
first kernel and the best tokens, `wall_ms` what passes for the host. Of steps that are started
while the device is at the one before, `wall_ms` is the time from one to the next.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kernels.gpu.backend import GpuKernels
from kernels.interface import Readback
from tests.gpu.bench import matmul_floor, read_floor
from tests.gpu.ceilings import ceilings
from tests.gpu.llama import Llama
from tests.gpu.place import Place
from tests.gpu.rank_run import make_capture
from tests.gpu.report import Case, Finding
from tests.gpu.timing import Timing, summarise
from worker.distributed.communicator import SingleRank
from worker.models.decoder import Model
from worker.models.forward_batch import InputBatch
from worker.runners.gpu_runner import GpuRunner, Work
from worker.runners.warm_up import GraphLadder

_STEPS = 40
_EAGER_STEPS = 15
_WARM_UP = 3

_DECODES = {  # name: (adapters in use, lora_rank, adapters that lie there, goal over base)
    "idle LoRA": (0, 16, 64, 0.01),
    "1 adapter r16": (1, 16, 64, 0.06),
    "8 adapters r16": (8, 16, 64, 0.09),
    "64 adapters r16": (64, 16, 64, 0.27),
    "64 adapters r8": (64, 8, 64, 0.16),
    "64 adapters r64": (64, 64, 64, 0.85),
}


def cases(place: Place) -> Iterator[Case]:
    bench = cache(lambda: _Bench(place))
    yield "64 rows, base", lambda: bench().base(64)
    yield "64 rows, base, again", lambda: bench().adapters(64, 0, 0, 0, None)
    for name, (used, lora_rank, held, goal) in _DECODES.items():
        if place.is_dry and name not in ("idle LoRA", "8 adapters r16"):
            continue
        args = (64, used, lora_rank, held, goal)
        yield f"64 rows, {name}", lambda args=args: bench().adapters(*args)
    yield "1 row, base", lambda: bench().one_row(0)
    yield "1 row, 1 adapter r16", lambda: bench().adapters(1, 1, 16, 64, None)
    for rows in (64, 1):
        yield f"{rows} row{'s' * (rows > 1)}, base, ahead", lambda rows=rows: bench().ahead(rows)
    yield "64 rows, base, deterministic", lambda: bench().deterministic(64)
    yield "1 row, base, deterministic", lambda: bench().deterministic(1)
    yield "64 rows, base, no graphs", lambda: bench().eager(64, 0)
    yield "64 rows, 8 adapters r16, no graphs", lambda: bench().eager(64, 8)
    yield "1 row, base, no graphs", lambda: bench().eager(1, 0)
    yield "prefill of 8,192, base", lambda: bench().prefill(0, is_deterministic=False)
    yield "prefill of 8,192, 1 adapter r16", lambda: bench().prefill(1, is_deterministic=False)
    yield "prefill of 8,192, base, deterministic", lambda: bench().prefill(0, is_deterministic=True)


class _Clock:
    """Marks where the device begins a step, after the host has prepared it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._capture = make_capture(place)
        self._start: torch.cuda.Event | None = None
        self._dry_start = 0.0

    def begin(self) -> None:
        """Note that what is launched next is the step's."""
        self._dry_start = time.perf_counter()
        if not self._place.is_dry:
            self._start = torch.cuda.Event(enable_timing=True)
            self._start.record()

    def seconds(self) -> float:
        """Return what has passed on the device since `begin`, when all is done."""
        if self._place.is_dry or self._start is None:
            return time.perf_counter() - self._dry_start
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return self._start.elapsed_time(end) / 1e3

    def capture(self, work: Work) -> Work:
        """Make a graph whose replay begins the step's time."""
        replay = self._capture(work)

        def timed() -> Tensor | None:
            self.begin()
            return replay()

        return timed


class _Bench:
    """A model and its runners: with graphs and without, deterministic and not."""

    def __init__(self, place: Place) -> None:
        self._place = place
        ceilings(place)  # before all else: the GPU is warm then
        self._llama = Llama(place)
        self._clock = _Clock(place)
        self._kernels = GpuKernels(deterministic=False)
        self._runners: dict[tuple[bool, bool], GpuRunner] = {}
        self._base_by_rows: dict[int, Timing] = {}

    def base(self, num_rows: int) -> Finding:
        """Time a step without adapters."""
        device, wall = self._time(self._llama.decodes(self._rows(num_rows), 0))
        self._base_by_rows[num_rows] = device
        return self._line(device, wall, self._llama.decode_bytes(self._rows(num_rows)))

    def one_row(self, num_adapters: int) -> Finding:
        """Time a single sequence, and what of it no kernel accounts for."""
        device, wall = self._time(self._llama.decodes(1, num_adapters))
        self._base_by_rows[1] = device
        outside = 1 - device.median / wall.median
        return self._line(device, wall, self._llama.decode_bytes(1)) | {
            "goal": "<= 10% outside kernels",
            "met": outside <= 0.1,
            "note": f"{outside:.1%} outside kernels",
        }

    def adapters(
        self, num_rows: int, used: int, lora_rank: int, held: int, goal: float | None
    ) -> Finding:
        """Time a step of rows with adapters against one without."""
        base = self._base(num_rows).median
        llama, rows = self._llama, self._rows(num_rows)
        held, used = min(held, llama.num_rows), min(used, rows)
        llama.load([lora_rank] * held)
        device, wall = self._time(llama.decodes(rows, used))
        extra = read_floor(self._place, llama.adapter_bytes(used))
        found = self._line(device, wall, llama.decode_bytes(rows) + llama.adapter_bytes(used))
        found |= _over(device, base, goal)
        return found | {"floor_over": f"{extra / base:+.1%}"}

    def ahead(self, num_rows: int) -> Finding:
        """Time steps that begin with the tokens of the one before, which the host reads later."""
        device = self._base(num_rows)
        self._seconds_each(num_rows, 1, count=self._place.pick(_WARM_UP, 1))
        one_by_one, ahead = (
            self._seconds_each(num_rows, most, count=self._place.pick(_STEPS, 1)) for most in (0, 1)
        )
        wall = Timing(ahead, ahead, ahead)
        found = self._line(device, wall, self._llama.decode_bytes(self._rows(num_rows)))
        return found | {
            "over": f"{ahead / device.median - 1:+.1%}",
            "note": f"wall over device; one by one {one_by_one / device.median - 1:+.1%}",
        }

    def _seconds_each(self, num_rows: int, most: int, count: int) -> float:
        """Return the time from step to step if at most so many are started ahead."""
        runner, device = self._runner(is_deterministic=False, with_graphs=True), self._place.device
        rows = self._llama.decodes(self._rows(num_rows), 0)
        rows = replace(rows, pending_rows=range(len(rows.token_ids)))
        ids = self._place.int64(rows.token_ids)
        asked: deque[Readback] = deque()
        self._place.wait()
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in range(count):
                logits = runner.run(rows, ids).logits
                assert logits is not None, "every step samples"
                _, ids = self._kernels.argmax(logits.part)
                asked.append(self._kernels.start_readback((ids,), device))
                if len(asked) > most:
                    asked.popleft().read()
            for fetched in asked:
                fetched.read()
        return (time.perf_counter() - start) / count

    def deterministic(self, num_rows: int) -> Finding:
        """Time a step whose products are batch-invariant."""
        base, rows = self._base(num_rows).median, self._rows(num_rows)
        device, wall = self._time(self._llama.decodes(rows, 0), is_deterministic=True)
        return self._line(device, wall, self._llama.decode_bytes(rows)) | _over(device, base, 0.15)

    def eager(self, num_rows: int, used: int) -> Finding:
        """Time a step that launches its kernels one by one."""
        base, rows = self._base(num_rows).median, self._rows(num_rows)
        if used:
            self._llama.load([16] * self._llama.num_rows)
        step = self._llama.decodes(rows, min(used, rows))
        device, wall = self._time(step, with_graphs=False)
        return self._line(device, wall, self._llama.decode_bytes(rows)) | _over(device, base, None)

    def prefill(self, used: int, *, is_deterministic: bool) -> Finding:
        """Time a whole prompt."""
        llama = self._llama
        if used:
            llama.load([16] * llama.num_rows)
        device, wall = self._time(
            llama.prefill(used), is_deterministic=is_deterministic, with_graphs=False
        )
        operations = llama.prefill_operations()
        return self._line(device, wall, 0) | {
            "floor_ms": matmul_floor(self._place, operations) * 1e3,
            "note": f"{llama.prompt / device.median:,.0f} tokens/s, "
            f"{operations / device.median / 1e12:.0f} TFLOP/s",
        }

    def _rows(self, num_rows: int) -> int:
        return min(num_rows, self._llama.num_rows)

    def _base(self, num_rows: int) -> Timing:
        if num_rows not in self._base_by_rows:
            self.base(num_rows)
        return self._base_by_rows[num_rows]

    def _time(
        self, rows: InputBatch, *, is_deterministic: bool = False, with_graphs: bool = True
    ) -> tuple[Timing, Timing]:
        """Return the times of a step on the device and for the host."""
        runner = self._runner(is_deterministic, with_graphs)
        count = self._place.pick(_STEPS if with_graphs else _EAGER_STEPS, 1)
        device, wall = [], []
        with torch.inference_mode():
            for turn in range(count + self._place.pick(_WARM_UP, 0)):
                self._place.wait()
                start = time.perf_counter()
                if not with_graphs:
                    self._clock.begin()
                logits = runner.run(rows).logits
                assert logits is not None, "every step samples"
                _, ids = self._kernels.argmax(logits.part)
                on_device = self._clock.seconds()
                ids.tolist()
                if turn >= self._place.pick(_WARM_UP, 0):
                    wall.append(time.perf_counter() - start)
                    device.append(on_device)
        assert bool(logits.part.isfinite().all()), "logits are not finite"
        return summarise(device), summarise(wall)

    def _runner(self, is_deterministic: bool, with_graphs: bool) -> GpuRunner:
        key = (is_deterministic, with_graphs)
        if key not in self._runners:
            llama, place = self._llama, self._place
            length = llama.prompt
            model = Model(
                llama.config,
                llama.part,
                llama.weights,
                SingleRank(),
                GpuKernels(is_deterministic),
                length,
            )
            runner = GpuRunner(
                model,
                llama.cache,
                llama.bank,
                place.device,
                max_model_len=length,
                max_num_batched_tokens=length,
                max_num_seqs=llama.num_rows,
                capture=self._clock.capture if with_graphs else None,
                pins_memory=not place.is_dry,
                ladder=GraphLadder(llama.page, length, has_adapters=True, rows=(1, self._rows(64))),
            )
            if with_graphs:
                runner.warm_up()
            self._runners[key] = runner
        return self._runners[key]

    def _line(self, device: Timing, wall: Timing, num_bytes: int) -> Finding:
        return {
            "ms": device.median * 1e3,
            "spread_ms": [device.low * 1e3, device.high * 1e3],
            "wall_ms": wall.median * 1e3,
            "floor_ms": read_floor(self._place, num_bytes) * 1e3,
        }


def _over(device: Timing, base: float, goal: float | None) -> Finding:
    """Return by how much a step takes longer than its base."""
    over = device.median / base - 1
    found: Finding = {"over": f"{over:+.1%}"}
    return found if goal is None else found | {"goal": f"<= {goal:.0%}", "met": over <= goal}
