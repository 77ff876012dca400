"""A whole rank, from a checkpoint on a disk to replies: memory, adapter loads, many and long.

At the shape of Llama-3.1-8B with random numbers. Needs the packages of `worker` as well. What is
timed are steps as a client sees them, from one reply to the next; a plan is started while the
device is at the one before it.
"""

import logging
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from tests.gpu.ceilings import ceilings
from tests.gpu.checkpoint import random_shard, write_checkpoint
from tests.gpu.place import Place
from tests.gpu.plans import PlannedRank
from tests.gpu.random_model import llama_config
from tests.gpu.report import Case, Finding
from worker.distributed.communicator import SingleRank
from worker.engine.rank import Rank
from worker.pools import PageCounts
from worker.protocol import PageCopy, RankConfig

_UTILIZATION = 0.9
_LORA_RANK = 16
_NUM_SLOTS = 16
_USED_SLOTS = 8  # by sequences; the others are loaded beside them
_ADAPTER_BYTES = 2 << 30
_LARGE_FILES = Path("/dev/shm")
_SWITCH_INTERVAL = 0.001  # seconds, as in a worker's process
_LOAD_GOAL, _MEMORY_GOAL = 1.1, 0.97


def cases(place: Place) -> Iterator[Case]:
    bench = cache(lambda: _Bench(place))
    yield "weights from a disk", lambda: bench().load()
    if not place.is_dry:
        yield "pages that are left", lambda: bench().measure()
    yield "warm-up", lambda: bench().warm_up()
    yield "prompts", lambda: bench().prompts()
    yield "decodes beside loads of adapters", lambda: bench().loads()
    yield "decodes beside pages to the host and back", lambda: bench().pages()
    yield "decodes of many", lambda: bench().many()
    yield "decodes of a long context", lambda: bench().long()
    if not place.is_dry:
        yield "memory in use after all", lambda: bench().used()


class _Bench:
    """A rank, in the order of its life."""

    def __init__(self, place: Place) -> None:
        self._place = place
        ceilings(place)  # before all else: the GPU is warm then
        place.tidy()
        sys.setswitchinterval(_SWITCH_INTERVAL)
        self._config = place.pick(
            llama_config(32, 4096, 14_336, (32, 8, 128), 128_256),
            llama_config(2, 64, 96, (4, 2, 32), 97),
        )
        self._page = place.pick(64, 16)
        self._num_seqs = place.pick(64, 2)
        self._many = place.pick(512, 4)
        self._context = place.pick(2048, 32)
        self._budget = place.pick(8192, 64)
        self._rank: Rank | None = None
        self._planned: PlannedRank | None = None
        self._host_pages = place.pick(256, 4)
        self._pages = PageCounts(place.pick(0, 64))
        self._shard = random_shard(self._config, place.pick(_LORA_RANK, 4), 1)

    def load(self) -> Finding:
        """Write the checkpoint and load it."""
        with tempfile.TemporaryDirectory(dir=_roomy()) as folder:
            path = Path(folder)
            write_checkpoint(self._place, self._config, path)
            self._place.tidy()
            num_bytes = sum(file.stat().st_size for file in path.iterdir())
            rank = self._rank = Rank(self._rank_config(path), SingleRank())
            start = time.perf_counter()
            info = rank.load()
            self._place.wait()
            seconds = time.perf_counter() - start
        self._weight_bytes = info.weight_bytes
        self._page_bytes = info.page_bytes
        return {
            "ms": seconds * 1e3,
            "note": f"{num_bytes / 1e9:.2f} GB, {num_bytes / 1e9 / seconds:.1f} GB/s",
        }

    def measure(self) -> Finding:
        """Ask the rank how many pages a GPU has left.

        vLLM's rule (`determine_available_memory` of its v1/worker/gpu_worker.py) counts weights,
        libraries and the largest step, and leaves graphs to the rest of the GPU.
        """
        start = time.perf_counter()
        with _heard("topwork.worker") as heard:
            pages = self._pages = self._on().measure_pages()
        seconds = time.perf_counter() - start
        use = pages.full * self._page_bytes
        share = use / (use + _told(heard[0], "graphs take"))
        return {
            "ms": seconds * 1e3,
            "goal": f">= {_MEMORY_GOAL:.0%} of vLLM's rule",
            "met": share >= _MEMORY_GOAL,
            "note": f"{pages.full:,} pages are {share:.1%}; {'; '.join(heard)}",
        }

    def warm_up(self) -> Finding:
        """Make all pages, compile and capture."""
        rank, pages = self._on(), self._pages
        start = time.perf_counter()
        rank.allocate(pages, PageCounts(self._host_pages))
        allocated = time.perf_counter()
        rank.warm_up()
        self._place.wait()
        end = time.perf_counter()
        self._planned = PlannedRank(rank, self._page, pages.full)
        note = f"pages {allocated - start:.1f} s, kernels and graphs {end - allocated:.1f} s"
        return {"ms": (end - start) * 1e3, "note": note}

    def prompts(self) -> Finding:
        """Load adapters and compute all prompts, as many in a step as it may have."""
        for slot in range(_USED_SLOTS):
            self._load(slot)
        self._place.wait()
        each = max(1, self._budget // self._context)
        start = time.perf_counter()
        for first in range(0, self._num_seqs, each):
            count = min(each, self._num_seqs - first)
            slots = [(first + i) * _USED_SLOTS // self._num_seqs for i in range(count)]
            self._plans.prefill([self._context] * count, slots)
        seconds = time.perf_counter() - start
        num_tokens = self._num_seqs * self._context
        return {
            "ms": seconds * 1e3,
            "note": f"{num_tokens:,} tokens, {num_tokens / seconds:,.0f} a second, 8 adapters",
        }

    def loads(self) -> Finding:
        """Time decodes with 8 adapters, by themselves and while another is loaded all the time."""
        self._plans.decode(self._place.pick(10, 2))
        alone: list[float] = []
        beside: list[float] = []
        took: list[float] = []
        for _ in range(self._place.pick(3, 1)):
            alone += self._plans.decode(self._place.pick(100, 3))
            with self._loading(took):
                beside += self._plans.decode(self._place.pick(100, 3))
        ratio = _percentile(beside, 99) / _percentile(alone, 99)
        size = len(self._shard.data)
        return self._compared(alone, beside) | {
            "goal": f"p99 <= {_LOAD_GOAL}x",
            "met": ratio <= _LOAD_GOAL,
            "note": f"p99 {ratio:.3f}x; {len(took)} loads of {size / 1e6:.0f} MB, the median in "
            f"{statistics.median(took) * 1e3:.1f} ms",
        }

    def pages(self) -> Finding:
        """Time decodes of which each saves a page to the host and has another back."""
        spare = self._plans.num_pages - 4
        copies = (
            PageCopy("save", spare, 1, self._page),
            PageCopy("restore", 0, spare + 1, self._page),
        )
        self._plans.decode(1, (PageCopy("save", spare, 0, self._page),))
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(self._place.pick(3, 1)):
            alone += self._plans.decode(self._place.pick(60, 3))
            beside += self._plans.decode(self._place.pick(60, 3), copies)
        note = f"a page of {self._page_bytes / 1e6:.1f} MB each way in every step"
        return self._compared(alone, beside) | {"note": note}

    def many(self) -> Finding:
        """Time decodes of as many sequences as a step may have, in pages that others computed."""
        each = self._place.pick(8, 1)  # pages
        tables = [one.pages[:each] for one in self._plans.running]
        self._plans.running, old = [], self._plans.running
        copies = -(-self._many // len(tables))
        self._plans.resume((tables * copies)[: self._many], [None] * self._many)
        self._plans.decode(2)
        seconds = self._plans.decode(self._place.pick(30, 3))
        self._plans.end_all()
        self._plans.running = old
        rows = f"{self._many} rows of {each * self._page:,} positions"
        floor = self._floor(self._many * (each * self._page + 16))
        middle = statistics.median(seconds)
        return {
            "ms": middle * 1e3,
            "p99_ms": _percentile(seconds, 99) * 1e3,
            "floor_ms": floor * 1e3,
            "note": f"{rows}, {self._many / middle:,.0f} tokens a second",
        }

    def long(self) -> Finding:
        """Time decodes of one sequence that has the pages of all."""
        table = [
            page for one in self._plans.running for page in one.pages[: self._context // self._page]
        ]
        self._plans.end_all()
        self._plans.resume([table[:-1]], [None])
        self._plans.decode(2)
        seconds = self._plans.decode(self._place.pick(40, 3))
        positions = (len(table) - 1) * self._page
        return {
            "ms": statistics.median(seconds) * 1e3,
            "p99_ms": _percentile(seconds, 99) * 1e3,
            "floor_ms": self._floor(positions) * 1e3,
            "note": f"{positions:,} positions",
        }

    def used(self) -> Finding:
        """Tell what share of the GPU is in use after all this."""
        free, total = torch.cuda.mem_get_info(self._place.device)
        share = 1 - free / total
        return {
            "goal": f"<= {_UTILIZATION:.0%}",
            "met": share <= _UTILIZATION,
            "note": f"{share:.2%}, {(total - free) / 2**20:,.0f} MiB",
        }

    def _on(self) -> Rank:
        assert self._rank is not None, "it could not be loaded"
        return self._rank

    @property
    def _plans(self) -> PlannedRank:
        assert self._planned is not None, "it was not warmed up"
        return self._planned

    def _load(self, slot: int) -> None:
        self._on().load_adapter(slot, f"{self._shard.digest}{slot}", (1.0,), (self._shard,))

    @contextmanager
    def _loading(self, took: list[float]) -> Iterator[None]:
        """Load adapters into slots that nobody uses, one after the other, in a thread."""
        stop = threading.Event()
        failed: list[Exception] = []

        def work() -> None:
            slot = _USED_SLOTS
            while not stop.is_set():
                start = time.perf_counter()
                try:
                    self._load(slot)
                except Exception as error:  # told to whom waits for this thread
                    failed.append(error)
                    return
                took.append(time.perf_counter() - start)
                slot = _USED_SLOTS + (slot + 1 - _USED_SLOTS) % (_NUM_SLOTS - _USED_SLOTS)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if failed:
            raise failed[0]

    def _floor(self, positions: int) -> float:
        """Return the seconds of reading weights and K and V of so many positions."""
        of_position = self._page_bytes / self._page
        return (self._weight_bytes + positions * of_position) / ceilings(self._place).read

    def _compared(self, alone: Sequence[float], beside: Sequence[float]) -> Finding:
        return {
            "ms": statistics.median(beside) * 1e3,
            "p99_ms": _percentile(beside, 99) * 1e3,
            "alone_ms": statistics.median(alone) * 1e3,
            "alone_p99_ms": _percentile(alone, 99) * 1e3,
        }

    def _rank_config(self, path: Path) -> RankConfig:
        place = self._place
        return RankConfig(
            model_dir=str(path),
            rank=0,
            tp=1,
            dtype="bfloat16",
            device=str(place.device),
            page_size=self._page,
            kv_memory_bytes=place.pick(None, 1 << 20),
            gpu_memory_utilization=_UTILIZATION,
            adapter_memory_bytes=_ADAPTER_BYTES,
            kv_host_memory_bytes=place.pick(4 << 30, 1 << 20),
            num_slots=_NUM_SLOTS,
            max_lora_rank=64,
            max_model_len=place.pick(131_072, 256),
            max_num_batched_tokens=self._budget,
            max_num_seqs=self._many,
            num_threads=None,
        )


def _told(text: str, what: str) -> int:
    """Return the bytes that a line says of something."""
    found = re.search(rf"{what} ([\d,]+) MiB", text)
    assert found is not None, f"nothing of {what} in {text}"
    return int(found[1].replace(",", "")) << 20


def _roomy() -> str | None:
    """Return a directory in memory if there is one with room for the checkpoint."""
    is_there = _LARGE_FILES.is_dir() and shutil.disk_usage(_LARGE_FILES).free > 40 << 30
    return str(_LARGE_FILES) if is_there else None


def _percentile(seconds: Sequence[float], share: int) -> float:
    in_order = sorted(seconds)
    return in_order[min(len(in_order) - 1, len(in_order) * share // 100)]


@contextmanager
def _heard(name: str) -> Iterator[list[str]]:
    """Yield what a logger says meanwhile."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, listener = logging.getLogger(name), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
