"""What a GPU has left for KV: pages and all that is used beside them fill what may be in use."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.kv_memory import MemoryUse, measure_use

MIB = 2**20


@dataclass
class Gpu:
    """A GPU's memory, of which a process holds what it has been told to."""

    total: int
    others: int = 0  # of other processes
    tensors: int = 0
    libraries: int = 0
    graphs: list[int] = field(default_factory=list)
    _peak: int = 0

    @property
    def in_use(self) -> int:
        return self.others + self.tensors + self.libraries + sum(self.graphs)

    def free(self) -> int:
        return self.total - self.in_use

    def allocated(self) -> int:
        return self.tensors

    def start_peak(self) -> None:
        self._peak = self.tensors

    def peak(self) -> int:
        return self._peak

    def borrow(self, num_bytes: int) -> None:
        """Have tensors for a moment."""
        self._peak = max(self._peak, self.tensors + num_bytes)


@dataclass
class Steps:
    """Steps of a model with so many graphs, of which each but the first takes as much."""

    gpu: Gpu
    largest: int
    workspace: int  # that a library keeps once it has been used
    graphs: list[int]

    def run_largest(self) -> None:
        self.gpu.libraries += self.workspace
        self.gpu.borrow(self.largest)

    def capture_graphs(self) -> Iterator[int]:
        for number, num_bytes in enumerate(self.graphs, 1):
            self.gpu.graphs.append(num_bytes)
            yield len(self.graphs) - number


sizes = st.integers(0, 4096).map(lambda n: n * MIB)


@given(
    *(sizes, sizes, sizes, sizes, sizes, sizes, st.integers(0, 64), sizes, st.integers(1, 100)),
)
def test_pages_fill_what_may_be_in_use_once_all_else_is_there(
    others: int,
    weights: int,
    largest: int,
    workspace: int,
    pages: int,
    first: int,
    num_graphs: int,
    adapters: int,
    percent: int,
) -> None:
    gpu = Gpu(1 << 40, others=others, tensors=weights + pages)
    graphs = [first, *[26 * MIB] * (num_graphs - 1)] if num_graphs else []
    steps = Steps(gpu, largest, workspace, graphs)
    use = measure_use(gpu, steps, pages_bytes=pages, adapters_bytes=adapters)
    gpu.graphs.clear()  # what was captured goes with its pages
    gpu.tensors -= pages

    for _ in steps.capture_graphs():  # what serving comes to
        pass
    gpu.tensors += adapters + use.left(percent / 100)
    assert gpu.in_use + largest == int(gpu.total * (percent / 100))


def test_few_graphs_are_captured_and_the_others_taken_to_be_like_them() -> None:
    gpu = Gpu(1 << 40)
    few = [16 * MIB, 0, 17 * MIB] * 4
    steps = Steps(gpu, 0, 0, [2048 * MIB, *few, *[5 * MIB] * 89])
    assert measure_use(gpu, steps, 0, 0).graphs == (2048 + 11 * (12 + 89)) * MIB
    assert len(gpu.graphs) == 13


def test_what_is_used_is_told_in_words() -> None:
    use = MemoryUse(80_000 * MIB, 17_000 * MIB, 1_000 * MIB, 2_600 * MIB, 1_024 * MIB)
    told = use.describe(0.9)
    for part in ("80,000 MiB", "90%", "17,000", "1,000", "2,600", "1,024 MiB", "50,376 MiB are"):
        assert part in told
    assert use.left(0.2) < 0
