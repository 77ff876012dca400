"""What the first steps wait for: warm-up with nothing compiled, and what follows it.

At the shape of Llama-3.1-8B. After `warm_up` the first step of each kind may take hardly longer
than the hundredth, and neither Triton nor a capture may have anything to do.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from functools import cache

import torch

from kernels.gpu.backend import GpuKernels
from tests.gpu.llama import Llama
from tests.gpu.place import Place
from tests.gpu.rank_run import make_capture
from tests.gpu.report import Case, Finding
from worker.distributed.communicator import SingleRank
from worker.models.decoder import Model
from worker.models.forward_batch import InputBatch
from worker.runners.gpu_runner import GpuRunner, Work

_TURNS = 100
_GOAL = 1.2  # times the last step


def cases(place: Place) -> Iterator[Case]:
    bench = cache(lambda: _Bench(place))
    yield "warm-up, nothing compiled before", lambda: bench().warm_up()
    for name in ("decode of 1", "decode of 64", "prompt", "decode of 64 with adapters"):
        yield f"first {name}", lambda name=name: bench().first(name)
    yield "compiled or captured after", lambda: bench().late()


class _Bench:
    """A rank's runner whose kernels no process has compiled yet."""

    def __init__(self, place: Place) -> None:
        self._place = place
        # Of this process alone: what another one has compiled would be found.
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
        self._llama = Llama(place)
        self._num_captured = 0
        self._capture = make_capture(place)
        length, llama = self._llama.prompt, self._llama
        model = Model(
            llama.config, llama.part, llama.weights, SingleRank(), GpuKernels(False), length
        )
        self._runner = GpuRunner(
            model,
            llama.cache,
            llama.bank,
            place.device,
            max_model_len=length,
            max_num_batched_tokens=length,
            max_num_seqs=256,
            capture=self._count,
            pins_memory=not place.is_dry,
        )
        self._before = (0, 0)

    def _count(self, work: Work) -> Work:
        self._num_captured += 1
        return self._capture(work)

    def warm_up(self) -> Finding:
        free = self._free_bytes()
        start = time.perf_counter()
        self._runner.warm_up()
        self._place.wait()
        seconds = time.perf_counter() - start
        self._before = self._counts()
        kernels, graphs = self._before
        used = (free - self._free_bytes()) / (1 << 20)
        return {
            "ms": seconds * 1e3,
            "note": f"{kernels} kernels compiled, {graphs} graphs, {used:,.0f} MiB",
        }

    def first(self, name: str) -> Finding:
        """Time the first step of a kind and the hundredth, wall clock until its end."""
        if name.endswith("adapters"):
            self._llama.load([16] * self._llama.num_rows)
        rows = self._rows(name)
        turns = self._place.pick(_TURNS if "prompt" not in name else 10, 2)
        with torch.inference_mode():
            seconds = [self._one(rows) for _ in range(turns)]
        last = sorted(seconds[turns // 2 :])[turns // 4]
        ratio = seconds[0] / last
        return {
            "ms": last * 1e3,
            "wall_ms": seconds[0] * 1e3,
            "over": f"{ratio - 1:+.1%}",
            "goal": f"<= {_GOAL - 1:.0%}",
            "met": ratio <= _GOAL,
        }

    def late(self) -> Finding:
        """Tell what was compiled and captured since the warm-up."""
        kernels, graphs = (now - was for now, was in zip(self._counts(), self._before, strict=True))
        found: Finding = {
            "note": f"{kernels} kernels, {graphs} graphs",
            "met": kernels + graphs == 0,
        }
        return found | {"goal": "none"}

    def _one(self, rows: InputBatch) -> float:
        self._place.wait()
        start = time.perf_counter()
        self._runner.run(rows)
        self._place.wait()
        return time.perf_counter() - start

    def _rows(self, name: str) -> InputBatch:
        llama = self._llama
        if name == "prompt":
            return llama.prefill(0)
        return llama.decodes(
            1 if name == "decode of 1" else llama.num_rows,
            min(8, llama.num_rows) if name.endswith("adapters") else 0,
        )

    def _counts(self) -> tuple[int, int]:
        """Return how many kernels Triton has compiled, and how many graphs were captured."""
        if self._place.is_dry:
            return 0, self._num_captured
        folder = os.environ["TRITON_CACHE_DIR"]
        kernels = sum(name.endswith(".cubin") for _, _, names in os.walk(folder) for name in names)
        return kernels, self._num_captured

    def _free_bytes(self) -> int:
        return 0 if self._place.is_dry else torch.cuda.mem_get_info(self._place.device)[0]
