"""What the warm-up runs is all that traffic asks for: no batch after it compiles a kernel."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.gpu.backend import GpuKernels
from kernels.sampling import RowSampling
from tests.gpu.place import Place
from tests.gpu.rank_run import make_runner
from tests.gpu.script import make_script
from tests.worker.compiled.launches import compiled_kernels, copied, later, some_batch
from worker.distributed.communicator import SingleRank
from worker.models.forward_batch import InputBatch
from worker.runners.gpu_runner import GpuRunner

PLACE = Place(torch.device("cpu"), is_dry=True)
NUM_PAGES, PAGE = 40, 16
VOCABULARY = 97
BATCHES = 40


def runner_of(kernels: GpuKernels, qk_norm: bool) -> GpuRunner:
    script = replace(
        make_script(torch.bfloat16, is_toy=True, qk_norm=qk_norm), num_pages=NUM_PAGES, page=PAGE
    )
    return make_runner(PLACE, script, SingleRank(), kernels, with_graphs=False)


def next_batch(chance: random.Random) -> InputBatch:
    """Return decodes and chunks of prompts in any number."""
    counts = [chance.choice((1, 1, 2, 16, 17, 64, 100, 260)) for _ in range(chance.randint(1, 5))]
    return some_batch(chance, counts, NUM_PAGES, PAGE, VOCABULARY)


def draw(kernels: GpuKernels, num_rows: int, chance: random.Random) -> None:
    logits = torch.zeros(num_rows, VOCABULARY)
    rows = [
        RowSampling(
            temperature=chance.choice((0.0, 0.7)),
            top_k=chance.choice((0, 1, 20)),
            top_p=chance.choice((0.5, 1.0)),
            min_p=chance.choice((0.0, 0.1)),
            seed=chance.getrandbits(64),
        )
        for _ in range(num_rows)
    ]
    kernels.argmax(logits)
    masks = [np.full(-(-VOCABULARY // 8), chance.randrange(256), np.uint8) for _ in rows]
    kernels.keep_allowed(logits, range(num_rows), masks)
    positions = [chance.randrange(1, 1000) for _ in rows]
    kernels.sample_rows(logits, kernels.send_draws(range(num_rows), rows, positions, logits.device))


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
        known = copied(found)
        assert {"_attend_split", "_merge_splits", "_attend_block", "expand_blocks"} <= set(known)
        for _ in range(BATCHES):
            rows = next_batch(chance)
            runner.run(rows)
            draw(kernels, len(rows.sample_rows), chance)
            assert not later(found, known), f"compiled for {rows}"


def test_a_kernel_that_the_warm_up_leaves_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the prompt of many rows, a deterministic product of many has a tile of its own."""
    kernels, chance = GpuKernels(deterministic=True), random.Random(3)
    with compiled_kernels() as found, torch.inference_mode():
        runner = runner_of(kernels, qk_norm=False)
        batches = list(runner._warm_up_batches())
        monkeypatch.setattr(runner, "_warm_up_batches", lambda: batches[:2])
        runner.warm_up()
        known = copied(found)
        for _ in range(BATCHES):
            runner.run(next_batch(chance))
        assert later(found, known)
