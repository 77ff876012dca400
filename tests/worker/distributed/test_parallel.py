"""Sums and gathers over threads and processes."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.patience import PATIENCE
from tests.ports import free_port
from tests.worker.distributed.group_member import WIDTHS, part_of, run_member
from worker.distributed.communicator import SingleRank, sum_in_pairs
from worker.distributed.parallel import TorchGroup, join_group
from worker.distributed.thread_group import ThreadGroup
from worker.errors import GroupBroken


def in_pairs(size: int, dtype: torch.dtype, num_rows: int = 5) -> torch.Tensor:
    """Sum as a tree: of five ranks, ((0 + 1) + (2 + 3)) + 4."""
    parts = [part_of(rank, dtype, num_rows).float() for rank in range(size)]
    match parts:
        case [a, b]:
            return a + b
        case [a, b, c]:
            return (a + b) + c
        case [a, b, c, d]:
            return (a + b) + (c + d)
    a, b, c, d, e = parts
    return ((a + b) + (c + d)) + e


def test_a_single_rank_gets_its_own_values_back():
    x = part_of(0)
    assert SingleRank().all_reduce(x) is x
    assert SingleRank().gather_first(x, [7]) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", range(1, 10))
def test_parts_of_a_sum_stay_as_they_are(size, dtype):
    parts = [(part_of(rank) * 100).to(dtype) for rank in range(size)]
    before = [part.clone() for part in parts]
    total = sum_in_pairs(parts)
    sums = [part if dtype == torch.int32 else part.float() for part in before]
    while len(sums) > 1:
        sums = [sum(sums[i : i + 2][1:], sums[i]) for i in range(0, len(sums), 2)]
    assert torch.equal(total, sums[0]) and total.dtype == sums[0].dtype
    assert all(map(torch.equal, parts, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_threads_sum_in_pairs_many_times_over(size, dtype):
    group = ThreadGroup(size, timeout=PATIENCE)

    def run(place):
        return [place.all_reduce(part_of(place.rank, dtype) * 2**turn) for turn in range(20)]

    with ThreadPoolExecutor(size) as threads:
        for sums in threads.map(run, group.communicators()):
            for turn, found in enumerate(sums):
                assert torch.equal(found, in_pairs(size, dtype) * 2**turn)


def test_threads_gather_uneven_columns_on_the_first_rank():
    group = ThreadGroup(3, timeout=PATIENCE)

    def run(place):
        return place.gather_first(part_of(place.rank)[:, : WIDTHS[place.rank]], WIDTHS)

    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(run, group.communicators())
    assert torch.equal(first, torch.cat([part_of(r)[:, :w] for r, w in enumerate(WIDTHS)], dim=1))
    assert others == [None, None]


def test_a_thread_that_fails_wakes_the_ones_that_wait():
    first, second = ThreadGroup(2, timeout=PATIENCE).communicators()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(first.all_reduce, part_of(0))
        second.close()
        with pytest.raises(GroupBroken):
            waiting.result(PATIENCE)
    with pytest.raises(GroupBroken):
        second.all_reduce(part_of(1))


def test_a_thread_that_never_comes_is_not_waited_for_forever():
    first, _ = ThreadGroup(2, timeout=0.05).communicators()
    with pytest.raises(GroupBroken):
        first.all_reduce(part_of(0))


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("size", [2, 3])
def test_processes_sum_in_pairs_and_notice_one_that_leaves(size):
    addresses = (free_address(), free_address(), free_address())
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_member, args=(addresses, rank, size, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        assert all(pipe.poll(60) for pipe in pipes)
        answers = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    parts = [part_of(rank)[:, :width] for rank, width in enumerate(WIDTHS[:size])]
    for rank, findings in enumerate(answers):
        assert len(findings) == 3  # of TorchGroup, SocketGroup and SharedGroup
        for sums, gathered, large, failure in findings:
            assert torch.equal(sums[0], in_pairs(size, torch.float32))
            assert torch.equal(sums[1], in_pairs(size, torch.bfloat16))
            assert torch.equal(large, in_pairs(size, torch.float32, num_rows=100_000)[::999])
            if rank == 0:
                assert torch.equal(gathered, torch.cat(parts, dim=1))
                assert "lost its group" in failure
            else:
                assert gathered is None


def test_a_rank_that_never_joins_is_not_waited_for_forever():
    with pytest.raises(GroupBroken, match="could not join"):
        join_group(free_address(), 1, 2, "cpu", 0.2, b"secret")


def test_a_group_of_one_process_needs_no_address():
    assert isinstance(join_group("", 0, 1, "cpu", 1.0, b"secret"), SingleRank)


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:3", 3)])
def test_a_rank_on_a_gpu_takes_the_one_it_is_told_or_the_first_it_sees(
    device: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nccl:
        class Options:
            pass

        def __init__(self, store: object, rank: int, size: int, options: object) -> None:
            assert (rank, size) == (1, 2)

    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr("worker.distributed.parallel._store", lambda *_: None)
    TorchGroup("tcp://127.0.0.1:1", 1, 2, device, 1.0)
    assert chosen == [index]
