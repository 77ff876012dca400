"""What the warm-up runs is all that traffic asks for: no batch after it compiles a kernel."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.gpu.backend import GpuKernels
from kernels.sampling import RowSampling
from tests.gpu.place import Place
from tests.gpu.rank_run import make_runner
from tests.gpu.script import make_script
from tests.kernels.gpu.compiler import _Driver
from worker.distributed.communicator import SingleRank
from worker.lora.adapter_bank import SlotRows
from worker.models.forward_batch import InputBatch
from worker.runners.gpu_runner import GpuRunner

PLACE = Place(torch.device("cpu"), is_dry=True)
NUM_PAGES, PAGE = 40, 16
VOCABULARY = 97
BATCHES = 40


class Late(Exception):
    """A kernel is compiled for a batch."""


@contextmanager
def compiled_kernels() -> Iterator[dict[str, set[Any]]]:
    """Compile what is launched inside, as a Hopper would, and give the ways of each kernel."""
    found: dict[str, set[Any]] = {}
    forgotten: set[int] = set()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if id(self) not in forgotten:
            self.device_caches.clear()
            forgotten.add(id(self))
        original(self, *arguments, grid=(1,), warmup=True, **options)
        found.setdefault(self.fn.__name__, set()).update(self.device_caches[0][0])

    original = JITFunction.run
    driver.set_active(_Driver(90))
    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = original


def runner_of(kernels: GpuKernels, qk_norm: bool) -> GpuRunner:
    script = replace(
        make_script(torch.bfloat16, is_toy=True, qk_norm=qk_norm), num_pages=NUM_PAGES, page=PAGE
    )
    return make_runner(PLACE, script, SingleRank(), kernels, with_graphs=False)


def some_batch(chance: random.Random) -> InputBatch:
    """Return decodes and chunks of prompts, of the base model and of an adapter, in any number."""
    counts = [chance.choice((1, 1, 2, 16, 17, 64, 100, 260)) for _ in range(chance.randint(1, 5))]
    lengths = [min(NUM_PAGES * PAGE, n + chance.choice((0, 1, 127, 300))) for n in counts]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    first_adapted = chance.randint(0, len(counts))
    runs = (SlotRows(0, starts[first_adapted], starts[-1]),)
    return InputBatch(
        token_ids=[chance.randrange(VOCABULARY) for _ in range(starts[-1])],
        query_starts=starts,
        context_lens=lengths,
        page_tables=[chance.sample(range(NUM_PAGES), NUM_PAGES) for _ in counts],
        decodes=[n == 1 and length > 1 for n, length in zip(counts, lengths, strict=True)],
        runs=runs if first_adapted < len(counts) else (),
        sample_rows=[stop - 1 for stop in starts[1:] if chance.random() < 0.7] or [starts[-1] - 1],
    )


def draw(kernels: GpuKernels, num_rows: int, chance: random.Random) -> None:
    logits = torch.zeros(num_rows, VOCABULARY)
    rows = [
        RowSampling(
            temperature=chance.choice((0.0, 0.7)),
            top_k=chance.choice((0, 1, 20)),
            top_p=chance.choice((0.5, 1.0)),
            min_p=chance.choice((0.0, 0.1)),
            seed=chance.getrandbits(64),
            position=chance.randrange(1, 1000),
        )
        for _ in range(num_rows)
    ]
    kernels.argmax(logits)
    kernels.sample_rows(logits, rows)


@pytest.mark.parametrize(
    ("is_deterministic", "qk_norm", "seed"), [(False, False, 1), (False, True, 2), (True, False, 3)]
)
def test_no_batch_after_the_warm_up_compiles_a_kernel(
    is_deterministic: bool, qk_norm: bool, seed: int
) -> None:
    kernels, chance = GpuKernels(is_deterministic), random.Random(seed)
    with compiled_kernels() as found, torch.inference_mode():
        runner = runner_of(kernels, qk_norm)
        runner.warm_up()
        draw(kernels, 1, chance)
        known = {name: set(ways) for name, ways in found.items()}
        assert {"_attend_split", "_merge_splits", "_attend_block", "expand_blocks"} <= set(known)
        for _ in range(BATCHES):
            rows = some_batch(chance)
            runner.run(rows)
            draw(kernels, len(rows.sample_rows), chance)
            late = {name: len(ways - known.get(name, set())) for name, ways in found.items()}
            assert not any(late.values()), f"{late} compiled for {rows}"


def test_a_kernel_that_the_warm_up_leaves_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the prompt of many rows, a deterministic product of many has a tile of its own."""
    kernels, chance = GpuKernels(deterministic=True), random.Random(3)
    with compiled_kernels() as found, torch.inference_mode():
        runner = runner_of(kernels, qk_norm=False)
        batches = list(runner._warm_up_batches())
        monkeypatch.setattr(runner, "_warm_up_batches", lambda: batches[:2])
        runner.warm_up()
        known = {name: set(ways) for name, ways in found.items()}
        for _ in range(BATCHES):
            runner.run(some_batch(chance))
        assert any(ways - known.get(name, set()) for name, ways in found.items())
