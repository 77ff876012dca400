"""kernels.native cores.h: a thread leaves a core that another one of its work needs."""

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.native.backend import NativeKernels
from kernels.native.library import Library, native_library
from kernels.native.program import RecordedProgram, Step, ThreadPool

ALLOWED = os.sched_getaffinity(0)
SOURCE = """
#define _GNU_SOURCE
#include "runtime/cores.h"

int64_t leave(int64_t num_needed, int64_t *left_at)
{
    int before = sched_getcpu();
    bool has_moved = leave_core(num_needed, left_at);
    return has_moved && sched_getcpu() != before;
}
"""

pytestmark = pytest.mark.skipif(
    len(ALLOWED) < 2 or native_library() is None, reason="one core, or no native library"
)


@pytest.fixture(autouse=True)
def all_cores() -> Iterator[None]:
    """Give this thread all its cores back."""
    yield
    os.sched_setaffinity(0, ALLOWED)


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Return the functions of the header in a library of their own."""
    folder = tmp_path_factory.mktemp("cores")
    (folder / "cores.c").write_text(SOURCE)
    include = Path(__file__).parents[3] / "kernels/native/csrc"
    command = ["cc", "-std=c11", "-O1", "-shared", "-fPIC", f"-I{include}"]
    subprocess.run([*command, "-o", folder / "cores.so", folder / "cores.c"], check=True)
    return ctypes.CDLL(str(folder / "cores.so"))


def leave(cores: ctypes.CDLL, num_needed: int, left_at: ctypes.c_int64) -> bool:
    return bool(cores.leave(ctypes.c_int64(num_needed), ctypes.byref(left_at)))


def come_to_one_core() -> None:
    """Bring this thread to one of its cores, which it may leave."""
    os.sched_setaffinity(0, {min(ALLOWED)})
    os.sched_setaffinity(0, ALLOWED)


def test_a_thread_goes_to_another_core_and_may_use_all_afterwards(cores: ctypes.CDLL) -> None:
    come_to_one_core()
    assert leave(cores, 2, ctypes.c_int64(0))
    assert os.sched_getaffinity(0) == ALLOWED


def test_a_thread_that_may_use_one_core_stays(cores: ctypes.CDLL) -> None:
    os.sched_setaffinity(0, {min(ALLOWED)})
    assert not leave(cores, 1, ctypes.c_int64(0))
    assert os.sched_getaffinity(0) == {min(ALLOWED)}


def test_where_there_are_fewer_cores_than_threads_none_moves(cores: ctypes.CDLL) -> None:
    come_to_one_core()
    assert not leave(cores, len(ALLOWED) + 1, ctypes.c_int64(0))


def test_a_thread_that_has_just_moved_stays(cores: ctypes.CDLL) -> None:
    left_at = ctypes.c_int64(0)
    come_to_one_core()
    assert leave(cores, 2, left_at)
    moved_at = left_at.value
    assert moved_at > 0
    left_at.value += 3_600 * 10**9  # a time to come: whatever the clock says meanwhile
    assert not leave(cores, 2, left_at)


def started_by(make: Callable[[], ThreadPool]) -> tuple[ThreadPool, set[int]]:
    """Return a thread pool and the threads that it has started."""
    before = set(map(int, os.listdir("/proc/self/task")))
    pool = make()
    return pool, set(map(int, os.listdir("/proc/self/task"))) - before


def core_of(thread: int) -> int:
    """Return where a thread was last, or is."""
    fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(fields[36])


@pytest.mark.skipif("TOPWORK_NATIVE_CFLAGS" in os.environ, reason="a sanitizer has own threads")
def test_threads_of_a_pool_that_were_woken_on_one_core_part() -> None:
    library: Library | None = native_library()
    assert library is not None
    os.sched_setaffinity(0, {min(ALLOWED)})  # which the threads that it starts have as well
    pool, threads = started_by(lambda: ThreadPool(library, 2))
    kernels, recorded = NativeKernels(pool), RecordedProgram(4)
    x = torch.randn(4, 48)
    with kernels.recording(recorded):
        for _ in range(40):
            kernels.add_rms_norm(x, None, torch.ones(48), 1e-6)
    for thread in (*threads, 0):
        os.sched_setaffinity(thread, ALLOWED)
    (other,) = threads
    for _ in range(50):  # the kernel may put the two on one core again at any time
        recorded.run(pool, Step(4))
        if core_of(other) != core_of(_own_thread()):
            return
        time.sleep(0.001)
    raise AssertionError(f"both threads are on core {core_of(other)}")


def _own_thread() -> int:
    return int(Path("/proc/thread-self").resolve().name)
