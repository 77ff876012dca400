"""How many pages a GPU has left, asked of real ranks with GPU kernels; only its memory is told."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.worker.interpreted.device import Graphs
from worker.cache.page_budget import page_num_bytes
from worker.distributed.thread_group import ThreadGroup
from worker.engine.rank import Rank
from worker.model_config_reader import read_model_config
from worker.pools import PageCounts
from worker.protocol import RankConfig
from worker.weights.partition import partition

STEP, ADAPTERS = 1 << 20, 1 << 22  # bytes


@dataclass
class Memory:
    """A GPU's memory, half of it taken, in which nothing changes but the peak of a step."""

    total: int
    num_peaks: int = 0

    def free(self) -> int:
        return self.total // 2

    def allocated(self) -> int:
        return 0

    def start_peak(self) -> None:
        pass

    def peak(self) -> int:
        self.num_peaks += 1
        return STEP


def measured_pages(path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> list[PageCounts]:
    """Return what each of two ranks says that its GPU has left."""
    monkeypatch.setattr("worker.engine.kv_memory.CudaMemory", lambda _: memory)
    config = RankConfig(
        model_dir=str(path),
        rank=0,
        tp=2,
        dtype="float32",
        page_size=16,
        kv_memory_bytes=None,
        adapter_memory_bytes=ADAPTERS,
        num_slots=2,
        max_model_len=96,
        max_num_batched_tokens=48,
        max_num_seqs=3,
        num_threads=None,
    )
    places = ThreadGroup(2, timeout=PATIENCE).communicators()
    ranks = [Rank(replace(config, rank=i), place) for i, place in enumerate(places)]
    with ThreadPoolExecutor(2) as threads:
        infos = list(threads.map(Rank.load, ranks))
        assert all(info.max_pages is None for info in infos)
        return list(threads.map(Rank.measure_pages, ranks))


def test_pages_are_what_a_gpu_has_left_beside_the_largest_step(
    tiny_model, on_gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, memory, graphs = tiny_model("llama").path, Memory(1 << 30), Graphs()
    on_gpu(graphs)
    pages = measured_pages(path, memory, monkeypatch)
    assert memory.num_peaks == 2
    assert graphs.made == 2 * 4, "of graphs a few are enough"
    model = read_model_config(path)
    left = int(0.9 * memory.total) - memory.total // 2 - STEP - ADAPTERS
    for rank, found in enumerate(pages):
        num_kv_heads = len(partition(model, 2, rank).kv_heads)
        page_bytes = page_num_bytes(model.num_layers, num_kv_heads, 16, 4 * model.head_dim)
        assert found == PageCounts(left // page_bytes)


@pytest.mark.parametrize("model", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_windows_and_states_are_measured_as_well(
    tiny_model, on_gpu, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    on_gpu(Graphs())
    for found in measured_pages(tiny_model(model).path, Memory(1 << 30), monkeypatch):
        assert found.full > 0 and found.window + found.state > 0


def test_a_gpu_without_room_for_a_page_is_told_with_all_that_is_there(
    tiny_model, on_gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(Graphs())
    with pytest.raises(ValueError, match=r"kv_cache_memory: of a GPU's 8 MiB 90% .* not a page"):
        measured_pages(tiny_model("llama").path, Memory(1 << 23), monkeypatch)
