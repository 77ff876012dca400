"""Sums through shared memory: bits, deaths, and who may share."""

import ctypes
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import pytest
import torch

from kernels.native.library import native_library
from tests.patience import PATIENCE
from tests.worker.distributed import shared_member
from tests.worker.distributed.shared_member import Task
from tests.worker.group import free_address, join_in_threads
from worker.distributed.communicator import Communicator
from worker.distributed.shared_group import SharedGroup
from worker.distributed.shared_memory import SharedMemory, host_identity
from worker.distributed.socket_group import SocketGroup
from worker.errors import GroupBroken


@pytest.fixture(autouse=True)
def _native() -> None:
    if native_library() is None:
        pytest.skip("this machine cannot have the native library")


Start = Callable[..., tuple[list[ForkServerProcess], list[Connection]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a group of processes with one task."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.worker.distributed.shared_member"])
    processes: list[ForkServerProcess] = []

    def run(size: int, task: Task, timeout: float = 60.0) -> object:
        address, pipes = free_address(), []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=shared_member.run_member, args=(address, rank, size, timeout, task, theirs)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        assert [told(pipe) for pipe in pipes] == ["SharedGroup"] * size
        return processes, pipes

    yield run  # type: ignore[misc]
    for process in processes:
        process.kill()
        process.join()


Join = Callable[[int, float], list[Communicator]]


@pytest.fixture
def join() -> Iterator[Join]:
    """Return a function that joins ranks that are threads; all leave at the end."""
    joined: list[Communicator] = []

    def places(size: int, timeout: float) -> list[Communicator]:
        joined.extend(join_in_threads(size, timeout))
        return joined[-size:]

    yield places
    for place in joined:
        place.close()


def told(pipe: Connection) -> object:
    assert pipe.poll(50), "a process says nothing"
    return pipe.recv()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_ranks_get_the_bits_of_sum_in_pairs_and_rank_0_all_columns(
    start: Start, size: int
) -> None:
    _, pipes = start(size, shared_member.sum_many)
    assert [told(pipe) for pipe in pipes] == [[]] * size


def test_a_rank_that_is_killed_breaks_the_group_long_before_a_timeout(start: Start) -> None:
    processes, pipes = start(3, shared_member.wait_for_the_last, timeout=PATIENCE)
    assert told(pipes[2]) == "takes no part"
    processes[2].kill()
    assert {told(pipe) for pipe in pipes[:2]} == {
        "rank 0 lost its group: rank 2 has left",
        "rank 1 lost its group: rank 2 has left",
    }


def test_a_rank_that_comes_after_the_timeout_finds_the_group_broken_for_good(join: Join) -> None:
    first, second = join(2, 0.2)
    assert isinstance(first, SharedGroup)
    with pytest.raises(GroupBroken, match="timed out"):
        first.all_reduce(torch.ones(3))
    total = second.all_reduce(torch.ones(3))  # the first had brought its part
    assert torch.equal(total, torch.full((3,), 2.0))
    with pytest.raises(GroupBroken, match="timed out"):
        first.all_reduce(torch.ones(3))


def test_a_rank_that_leaves_wakes_those_that_wait_and_itself_can_do_no_more(join: Join) -> None:
    first, second = join(2, 600.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(first.all_reduce, torch.ones(3))
        second.close()
        with pytest.raises(GroupBroken, match="rank 1 has left"):
            waiting.result(PATIENCE)
    with pytest.raises(GroupBroken, match="it has left"):
        second.all_reduce(torch.ones(3))


def test_what_a_rank_brought_before_it_left_still_counts(join: Join) -> None:
    first, second, third = join(3, 30.0)
    columns, widths = torch.arange(12.0).view(3, 4), [4, 4, 4]
    assert third.gather_first(columns, widths) is None
    third.close()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(first.gather_first, columns, widths)
        time.sleep(0.1)  # so long that the first looks for who has left
        assert second.gather_first(columns, widths) is None
        gathered = waiting.result(PATIENCE)
    assert gathered is not None
    assert torch.equal(gathered, torch.cat([columns] * 3, dim=1))


def test_no_file_system_has_a_name_for_the_memory_not_even_after_a_kill(start: Start) -> None:
    processes, pipes = start(2, shared_member.look_around)
    for pipe in pipes:
        shared = told(pipe)
        assert isinstance(shared, list) and "/memfd:topwork (deleted)" in shared
        assert not any(name.startswith("/dev/shm") for name in shared)
    for process in processes:
        process.kill()
        process.join()
    assert not any("topwork" in name for name in os.listdir("/dev/shm"))


def both_sum(places: list[Communicator]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(lambda place: place.all_reduce(torch.ones(3)), places))


def assert_all_fall_back(join: Join) -> None:
    places = join(3, 30.0)
    assert [type(place) for place in places] == [SocketGroup] * 3
    assert all(torch.equal(total, torch.full((3,), 3.0)) for total in both_sum(places))


def test_ranks_on_different_hosts_all_use_sockets(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter([host_identity(), "another", host_identity()])
    monkeypatch.setattr("worker.distributed.shared_group.host_identity", lambda: next(hosts))
    assert_all_fall_back(join)


def test_one_rank_without_the_native_library_makes_all_use_sockets(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = iter([native_library(), None, native_library()])
    monkeypatch.setattr("worker.distributed.shared_group.native_library", lambda: next(libraries))
    assert_all_fall_back(join)


def test_without_memory_to_share_all_use_sockets_and_the_log_says_why(
    join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING):
        assert_all_fall_back(join)
    assert "cannot share memory: rank 0 got none: No space left on device" in caplog.text


def test_one_rank_that_cannot_map_the_memory_makes_all_use_sockets(
    join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = SharedMemory.find
    turns = iter([False, True])

    def find_once(ticket: str, num_bytes: int) -> SharedMemory:
        if next(turns):
            raise PermissionError("not yours")
        return find(ticket, num_bytes)

    monkeypatch.setattr(SharedMemory, "find", find_once)
    with caplog.at_level(logging.WARNING):
        assert_all_fall_back(join)
    assert "could not map it: not yours" in caplog.text


def test_float32_is_summed_in_place_and_nothing_else_is(join: Join) -> None:
    places = join(2, 30.0)
    values = torch.arange(24.0).view(4, 6)
    kinds = [values, values.half(), values.bfloat16(), values.t(), values[:, ::2], values[:0]]
    for kind in kinds:
        given = [kind.clone(memory_format=torch.preserve_format) for _ in places]
        if kind.shape == (4, 3):
            given = [values.clone()[:, ::2] for _ in places]
        with ThreadPoolExecutor(2) as threads:
            totals = list(threads.map(lambda p, x: p.all_reduce(x), places, given))
        for x, total in zip(given, totals, strict=True):
            assert total.dtype == torch.float32 and torch.equal(total, 2 * kind.float())
            is_same = total.data_ptr() == x.data_ptr() and kind.numel() > 0
            assert is_same == (kind is values)


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(3, dtype=torch.bfloat16)])
def test_ranks_that_do_not_bring_the_same_break_instead_of_adding_it_up(
    join: Join, other: torch.Tensor
) -> None:
    places = join(2, 30.0)
    with ThreadPoolExecutor(2) as threads:
        sums = [
            threads.submit(place.all_reduce, x)
            for place, x in zip(places, (torch.ones(3), other), strict=True)
        ]
        for total in sums:
            with pytest.raises(GroupBroken, match="same calls"):
                total.result()


@pytest.mark.parametrize("number", [3, 1 << 40, (1 << 64) - 2])
def test_a_number_that_no_rank_can_have_come_to_breaks_the_group(join: Join, number: int) -> None:
    first, second = join(2, 30.0)
    assert isinstance(second, SharedGroup)
    header = (ctypes.c_uint64 * 3).from_address(second._memory.address + 128)
    header[:] = [number, 12, 12]  # of a sum of three, as `first` expects it
    with pytest.raises(GroupBroken, match="same calls"):
        first.all_reduce(torch.ones(3))
