"""native_runner.RecordedGroup: sums over ranks that are ops of a recorded program."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from kernels.native.backend import NativeKernels
from kernels.native.library import Library, native_library
from kernels.native.program import RecordedProgram, Step, ThreadPool
from tests.patience import PATIENCE
from tests.worker.group import join_in_threads
from worker.distributed.communicator import Communicator
from worker.distributed.shared_group import SharedGroup
from worker.errors import GroupBroken
from worker.runners.native_runner import RecordedGroup

WIDTH = 48
MAX_ROWS = 7


@pytest.fixture
def library() -> Library:
    library = native_library()
    if library is None:
        pytest.skip("this machine cannot have the native library")
    return library


@pytest.fixture
def groups() -> Iterator[list[Communicator]]:
    joined = join_in_threads(2, 60.0)
    yield joined
    for one in joined:
        one.close()


class HalfModel:
    """One rank's program: norms and linears in turns, each linear summed over the ranks."""

    def __init__(self, library: Library, group: Communicator, num_threads: int = 1) -> None:
        generator = torch.Generator().manual_seed(1 + group.rank)
        self.weights = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(4)]
        self.thread_pool = ThreadPool(library, num_threads)
        self.kernels, self.program = NativeKernels(self.thread_pool), RecordedProgram(MAX_ROWS)
        self.x = torch.empty(MAX_ROWS, WIDTH)
        with self.kernels.recording(self.program):
            self.y = self._layers(RecordedGroup(group, self.program, library))

    def _layers(self, group: RecordedGroup) -> Tensor:
        x, residual = self.x, None
        for weight in self.weights:
            normed, residual = self.kernels.add_rms_norm(x, residual, torch.ones(WIDTH), 1e-6)
            x = group.all_reduce(self.kernels.linear(normed, self.kernels.prepare_linear(weight)))
        return x

    def run(self, x: Tensor) -> Tensor:
        num_rows = len(x)
        self.x[:num_rows] = x
        self.program.run(self.thread_pool, Step(num_rows))
        return self.y[:num_rows].clone()


def expected(halves: list[HalfModel], x: Tensor) -> Tensor:
    """Return what the ranks' models compute together, op by op."""
    kernels, residual = halves[0].kernels, None
    for weights in zip(*(half.weights for half in halves), strict=True):
        normed, residual = kernels.add_rms_norm(x, residual, torch.ones(WIDTH), 1e-6)
        one, other = (kernels.linear(normed, kernels.prepare_linear(w)) for w in weights)
        x = one + other
    return x


def rows(num_rows: int) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_ranks_compute_together_what_one_would(
    library: Library, groups: list[Communicator], num_threads: int
) -> None:
    assert all(isinstance(group, SharedGroup) for group in groups)
    halves = [HalfModel(library, group, num_threads) for group in groups]
    with ThreadPoolExecutor(2) as threads:
        for num_rows in (1, MAX_ROWS, 3):
            x = rows(num_rows)
            one, other = threads.map(lambda half, x=x: half.run(x), halves)  # type: ignore[misc]
            assert torch.equal(one, expected(halves, x))
            assert torch.equal(other, one)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rank_that_is_late_halts_the_others_programs_and_changes_nothing(
    library: Library,
    groups: list[Communicator],
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves = [HalfModel(library, group, num_threads) for group in groups]
    has_halted = threading.Event()
    all_reduce = SharedGroup.all_reduce

    def told(self: SharedGroup, x: Tensor) -> Tensor:
        has_halted.set()
        return all_reduce(self, x)

    monkeypatch.setattr(SharedGroup, "all_reduce", told)
    x = rows(4)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(halves[0].run, x)
        assert has_halted.wait(PATIENCE), "a program waits for a rank that has not begun"
        last = threads.submit(halves[1].run, x)
        assert torch.equal(first.result(), expected(halves, x))
        assert torch.equal(last.result(), first.result())


def test_a_rank_that_has_left_ends_a_step_and_leaves_the_thread_pool_as_it_was(
    library: Library, groups: list[Communicator]
) -> None:
    halves = [HalfModel(library, group, 2) for group in groups]
    groups[1].close()
    with pytest.raises(GroupBroken, match="rank 1 has left"):
        halves[0].run(rows(3))
    kernels, x = halves[0].kernels, rows(2)
    alone = NativeKernels(ThreadPool(library, 1))
    weight = kernels.prepare_linear(halves[0].weights[0])
    assert torch.equal(kernels.linear(x, weight), alone.linear(x, weight))


def test_ranks_with_more_threads_than_cores_agree_step_after_step(
    library: Library, groups: list[Communicator]
) -> None:
    halves = [HalfModel(library, group, 3) for group in groups]
    with ThreadPoolExecutor(2) as threads:
        for number in range(100):
            x = rows(1 + number % MAX_ROWS)
            one, other = (threads.submit(half.run, x) for half in halves)
            assert torch.equal(one.result(), expected(halves, x))
            assert torch.equal(other.result(), one.result())
