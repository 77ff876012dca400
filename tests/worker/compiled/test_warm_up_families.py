"""The same of models with experts, windows and states: no batch after the warm-up compiles."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cluster.adapters.sharding import cut
from kernels.gpu.backend import GpuKernels
from tests.worker.compiled.launches import compiled_kernels, copied, later, some_batch
from tests.worker.models.families.tiny import adapter_kind, tiny_family
from tests.worker.peft_adapters import make_adapter_dir, read
from worker.distributed.communicator import SingleRank
from worker.engine import loaded_model
from worker.engine.loaded_model import load_model
from worker.model_config_reader import read_model_config
from worker.models.forward_batch import InputBatch
from worker.pools import NO_PAGES, PageCounts
from worker.protocol import RankConfig
from worker.runners.gpu_runner import GpuRunner

# Of the others `make test` has parts: experts with states, and, in test_warm_up.py, neither.
SLOW = [
    pytest.param(family, marks=pytest.mark.slow)
    for family in ("qwen3_moe", "gpt_oss", "lfm2", "granitemoehybrid_sparse")
]
NUM_PAGES, PAGE = 40, 16
MOST_TOKENS = 1024  # of a step
BATCHES = 15


@dataclass(frozen=True)
class Saved:
    """A tiny model and an adapter, where they were saved."""

    model: Path
    adapter: Path


@pytest.fixture(scope="module", params=["qwen3_5_moe", *SLOW])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family's model, and its adapter on all that it has."""
    model, folder = tiny_family(request.param), tmp_path_factory.mktemp(request.param)
    found = Saved(folder / "model", folder / "adapter")
    model.save_pretrained(found.model)
    make_adapter_dir(model, adapter_kind(request.param), found.adapter)
    return found


@pytest.fixture
def runner(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuRunner]:
    """A rank's runner with GPU's kernels, of a model whose adapter is in slot 0."""
    config = RankConfig(
        model_dir=str(saved.model),
        rank=0,
        tp=1,
        dtype="bfloat16",
        page_size=PAGE,
        kv_memory_bytes=0,
        num_slots=1,
        max_model_len=NUM_PAGES * PAGE,
        max_num_batched_tokens=MOST_TOKENS,
        num_threads=None,
    )
    monkeypatch.setattr(loaded_model, "kernels_for", lambda *_: GpuKernels(deterministic=False))
    monkeypatch.setattr(loaded_model, "_variant_linears", lambda *_: ())  # it runs kernels
    model_config = read_model_config(saved.model)
    with torch.inference_mode():
        loaded = load_model(config, model_config, SingleRank())
        shard = cut(read(saved.adapter, model_config), loaded.part)
        loaded.bank.load(0, "adapter", (1.0,), (shard,))
        yield GpuRunner(
            loaded.model,
            loaded.new_cache(PageCounts(NUM_PAGES, NUM_PAGES, 8), NO_PAGES),
            loaded.bank,
            torch.device("cpu"),
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            capture=None,
            pins_memory=False,
        )


def next_batch(chance: random.Random) -> InputBatch:
    """Return decodes and chunks of prompts, up to a whole step of them."""
    counts = [chance.choice((1, 1, 2, 16, 17, 100, 260, 640)) for _ in range(chance.randint(1, 5))]
    while sum(counts) > MOST_TOKENS:
        counts.pop()
    return some_batch(chance, counts, NUM_PAGES, PAGE, vocabulary=97)


def test_no_batch_of_a_family_compiles_a_kernel_after_the_warm_up(runner: GpuRunner) -> None:
    chance = random.Random(5)
    with compiled_kernels() as found, torch.inference_mode():
        runner.warm_up()
        known = copied(found)
        for _ in range(BATCHES):
            rows = next_batch(chance)
            runner.run(rows)
            assert not later(found, known), f"compiled for {rows}"


@pytest.mark.parametrize("saved", ["qwen3_5_moe"], indirect=True)
def test_prompts_of_many_rows_that_the_warm_up_leaves_out_are_noticed(
    runner: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For those the products of experts have tiles of their own."""
    chance = random.Random(5)
    with compiled_kernels() as found, torch.inference_mode():
        first, *_, last = runner._warm_up_batches()
        monkeypatch.setattr(runner, "_warm_up_batches", lambda: [first, last])
        runner.warm_up()
        known = copied(found)
        for _ in range(BATCHES):
            runner.run(next_batch(chance))
        assert later(found, known)
