"""kernels.native.program: ops that one call runs on all threads of a pool."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import Program, RecordedProgram, Step, ThreadPool

WIDTH = 48


def chain(kernels: NativeKernels, x: Tensor, weights: list[Tensor]) -> Tensor:
    """Return x through linears, each with a norm before it that reads what was just written."""
    residual = None
    for weight in weights:
        normed, residual = kernels.add_rms_norm(x, residual, torch.ones(WIDTH), 1e-6)
        x = kernels.linear(normed, kernels.prepare_linear(weight))
    return x


@pytest.fixture
def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(40)]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_recorded_program_does_what_the_ops_did_one_by_one_for_any_number_of_rows(
    library: Library, weights: list[Tensor], num_threads: int
) -> None:
    thread_pool = ThreadPool(library, num_threads)
    kernels, recorded = NativeKernels(thread_pool), RecordedProgram(32)
    x = torch.full((32, WIDTH), torch.nan)
    with kernels.recording(recorded):
        out = chain(kernels, x, weights)
    for num_rows in (1, 32, 7, 1):
        x[:num_rows] = torch.randn(num_rows, WIDTH)
        recorded.run(thread_pool, Step(num_rows))
        assert torch.equal(out[:num_rows], chain(kernels, x[:num_rows].clone(), weights))


def test_a_recorded_call_comes_between_the_ops(library: Library, weights: list[Tensor]) -> None:
    thread_pool = ThreadPool(library, 2)
    kernels, recorded = NativeKernels(thread_pool), RecordedProgram(4)
    x = torch.randn(4, WIDTH)

    def replace(num_rows: int) -> None:
        first[:num_rows] = num_rows

    with kernels.recording(recorded):
        first = chain(kernels, x, weights[:1])
        recorded.call(replace)
        last = chain(kernels, first, weights[1:2])
    recorded.run(thread_pool, Step(3))
    expected = chain(kernels, torch.full((3, WIDTH), 3.0), weights[1:2])
    assert torch.equal(last[:3], expected)


def test_more_rows_than_a_recorded_program_has_room_for_are_refused(library: Library) -> None:
    with pytest.raises(AssertionError, match="5 rows in a program for 4"):
        RecordedProgram(4).run(ThreadPool(library, 1), Step(5))


def test_programs_of_unequal_size_take_turns_on_one_thread_pool(
    library: Library, weights: list[Tensor]
) -> None:
    thread_pool = ThreadPool(library, 3)
    kernels = NativeKernels(thread_pool)
    x = torch.randn(9, WIDTH)
    programs: list[tuple[RecordedProgram, Tensor, Tensor]] = []
    for count in (1, 40, 2):
        recorded = RecordedProgram(9)
        with kernels.recording(recorded):
            out = chain(kernels, x, weights[:count])
        programs.append((recorded, out, chain(kernels, x, weights[:count])))
    for _ in range(50):
        for recorded, out, expected in programs:
            out.fill_(torch.nan)
            recorded.run(thread_pool, Step(9))
            assert torch.equal(out, expected)


def test_an_empty_program_returns_and_leaves_the_next_alone(
    library: Library, weights: list[Tensor]
) -> None:
    thread_pool = ThreadPool(library, 3)
    kernels, recorded = NativeKernels(thread_pool), RecordedProgram(4)
    x = torch.randn(4, WIDTH)
    with kernels.recording(recorded):
        out = chain(kernels, x, weights[:3])
    expected = chain(kernels, x, weights[:3])
    for _ in range(200):
        thread_pool.run(Program(), Step(1))
        out.fill_(torch.nan)
        recorded.run(thread_pool, Step(4))
        assert torch.equal(out, expected)


def test_a_thread_pool_without_a_user_ends_its_threads(library: Library) -> None:
    def num_threads() -> int:
        with open("/proc/self/status") as status:
            return int(next(line for line in status if line.startswith("Threads:")).split()[1])

    before = num_threads()
    thread_pool = ThreadPool(library, 6)
    assert num_threads() == before + 5
    del thread_pool
    assert num_threads() == before


def test_thread_pools_of_several_callers_run_side_by_side(
    library: Library, weights: list[Tensor]
) -> None:
    x = torch.randn(5, WIDTH)
    expected = chain(NativeKernels(ThreadPool(library, 1)), x, weights)
    results: list[Tensor] = []

    def call() -> None:
        results.append(chain(NativeKernels(ThreadPool(library, 2)), x, weights))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 3
    assert all(torch.equal(one, expected) for one in results)


LAST_CALL = """
import threading
from dataclasses import replace
from kernels.native.library import native_library
from kernels.native.program import Program, Step, ThreadPool
pool = ThreadPool(replace(native_library(), thread_pool_free=lambda _: print("freed")), 2)
is_running = threading.Event()
def run():
    while True:
        pool.run(Program(), Step(1))
        is_running.set()
threading.Thread(target=run, daemon=True).start()
is_running.wait()
"""


def test_at_the_interpreters_end_no_pool_is_freed_that_a_daemon_thread_may_be_in(
    library: Library,
) -> None:
    done = subprocess.run([sys.executable, "-c", LAST_CALL], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
