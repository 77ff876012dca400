"""Products in int8 whose inputs ranks share have the bits of one rank with all inputs."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.experts import Routing
from kernels.linear import LinearWeight, SharedInputs
from kernels.native.backend import NativeKernels
from kernels.native.library import native_library
from kernels.native.program import RecordedProgram, Step, ThreadPool
from kernels.quantized import columns_of, quantize, quantized_linear
from tests.patience import PATIENCE
from tests.worker.group import free_address, join_in_threads
from worker.distributed.communicator import Communicator, SingleRank
from worker.distributed.parallel import TorchGroup
from worker.distributed.row_parallel import all_inputs, row_parallel_linear, shared_product
from worker.distributed.shared_group import SharedGroup
from worker.distributed.socket_group import SocketGroup
from worker.distributed.thread_group import ThreadGroup
from worker.runners.native_runner import RecordedGroup

# The inputs of each rank: of heads, MLP features and the like that do not divide.
CUTS = [(70,), (48, 22), (24, 24, 22), (40, 8, 21, 1)]
WIDTH, OUTPUTS = 70, 45
IN_GROUPS = [(136,), (96, 40), (32, 32, 72), (32, 64, 32, 8)]


def kernels() -> NativeKernels:
    library = native_library()
    if library is None:
        pytest.skip("no native library")
    return NativeKernels(ThreadPool(library, 1))


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_rows(num_rows: int, dtype: torch.dtype, width: int = WIDTH) -> Tensor:
    """Return rows of unlike size, one of zeros, one with a NaN and one with an infinity.

    Some groups of a row have larger numbers than others.
    """
    x = randn(num_rows, width, seed=3) * 10.0 ** (torch.arange(num_rows) % 5 - 2).unsqueeze(1)
    x *= 3.0 ** (torch.arange(width) // 32 * 7 % 3)
    x[1], x[2, 50], x[3, 69] = 0.0, torch.nan, -torch.inf
    return x.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def spans(cuts: Sequence[int]) -> list[slice]:
    ends = [sum(cuts[: index + 1]) for index in range(len(cuts))]
    return [slice(end - width, end) for end, width in zip(ends, cuts, strict=True)]


def on_each(groups: Sequence[Communicator], run: Callable[[Communicator], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(run, groups))


def in_threads(size: int) -> Sequence[Communicator]:
    if size == 1:
        return (SingleRank(),)
    return ThreadGroup(size, timeout=PATIENCE).communicators()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [*CUTS, *IN_GROUPS], ids=str)
def test_any_number_of_ranks_gives_the_bits_of_one(
    cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    bias = randn(OUTPUTS, seed=2)
    in_groups = cuts in IN_GROUPS
    weight = quantize(randn(OUTPUTS, sum(cuts), seed=1), "int8", is_rotated=in_groups)
    assert weight.is_rotated == in_groups
    x = some_rows(9, dtype, sum(cuts))
    own = spans(cuts)

    def run(group: Communicator) -> Tensor:
        one, columns = kernels(), own[group.rank]
        packed = one.prepare_quantized_linear(columns_of(weight, columns), bias, dtype)
        shared = replace(packed, shared=SharedInputs(columns.start, sum(cuts)))
        return row_parallel_linear(one, x[:, columns], shared, None, group)

    for found in on_each(in_threads(len(cuts)), run):
        assert same_bits(found, quantized_linear(x, weight, bias))


@pytest.mark.parametrize("cuts", [CUTS[1], IN_GROUPS[2]], ids=str)
def test_experts_do_so_pair_by_pair(cuts: tuple[int, ...]) -> None:
    width, in_groups = sum(cuts), cuts in IN_GROUPS
    weights = [
        quantize(randn(OUTPUTS, width, seed=expert), "int8", is_rotated=in_groups)
        for expert in range(4)
    ]
    bias, logits = randn(4, OUTPUTS, seed=9), randn(20, 4, seed=8)
    rows = some_rows(24, torch.float32, width)[4:]
    logits[:, 1] = -torch.inf  # nobody's
    own = spans(cuts)

    def run(group: Communicator) -> Tensor:
        one, columns = kernels(), own[group.rank]
        routed = one.route(logits, Routing(2, True, 4))
        packed = one.prepare_quantized_experts(
            [columns_of(weight, columns) for weight in weights], bias, torch.float32
        )
        x = one.permute(rows, routed)[:, columns]
        return shared_product(one, x, packed, group, routed)

    found = on_each(in_threads(len(cuts)), run)
    one = kernels()
    routed = one.route(logits, Routing(2, True, 4))
    x, starts = one.permute(rows, routed), routed.starts.tolist()
    for expert, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        right = quantized_linear(x[start:stop], weights[expert], bias[expert])
        assert all(torch.equal(y[start:stop], right) for y in found)


def test_a_recorded_program_does_so_over_shared_memory() -> None:
    cuts = IN_GROUPS[2]
    weight = quantize(randn(OUTPUTS, sum(cuts), seed=1), "int8")
    groups, own = join_in_threads(len(cuts), PATIENCE), spans(cuts)
    x = some_rows(8, torch.bfloat16, sum(cuts))

    def run(group: Communicator) -> Tensor:
        assert isinstance(group, SharedGroup)
        one, columns, program = kernels(), own[group.rank], RecordedProgram(8)
        packed = one.prepare_quantized_linear(columns_of(weight, columns), None, torch.bfloat16)
        rows = torch.empty(8, cuts[group.rank], dtype=torch.bfloat16)
        with one.recording(program):
            places = RecordedGroup(group, program, one.thread_pool.library)
            shared = replace(packed, shared=SharedInputs(columns.start, sum(cuts)))
            y = row_parallel_linear(one, rows, shared, None, places)
            everything = all_inputs(one, rows, shared, places)
        results = []
        for num_rows in (8, 3):
            rows[:num_rows] = x[:num_rows, columns]
            program.run(one.thread_pool, Step(num_rows))
            results.append(y[:num_rows].clone())
            assert same_bits(everything[:num_rows], x[:num_rows])
        return torch.cat(results)

    try:
        for found in on_each(groups, run):
            assert same_bits(found[:8], quantized_linear(x, weight))
            assert same_bits(found[8:], quantized_linear(x[:3], weight))
    finally:
        for group in groups:
            group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_lora_takes_the_inputs_of_all_ranks(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of rows that are parts of longer ones, and of a share that ends within a word."""
    x, own = some_rows(9, dtype), spans(cuts)

    def run(group: Communicator) -> Tensor:
        columns = own[group.rank]
        shared = SharedInputs(columns.start, WIDTH)
        weight = LinearWeight(x, None, cuts[group.rank], OUTPUTS, dtype, shared=shared)
        return all_inputs(kernels(), x[:, columns], weight, group)

    for found in on_each(in_threads(len(cuts)), run):
        assert found.dtype == dtype
        assert same_bits(found, x)


@pytest.mark.parametrize("transport", ["threads", "sockets", "shared memory", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_integers_are_summed_as_integers(transport: str, size: int) -> None:
    """Of a size that no float32 holds, over more than one segment, and modulo 2^32."""
    if transport == "shared memory" and native_library() is None:
        pytest.skip("no native library")
    groups = in_threads(size) if transport == "threads" else _over(transport, size)
    count = 100_003
    parts = [torch.arange(count, dtype=torch.int32) * 21_000 + rank for rank in range(size)]
    found = on_each(groups, lambda group: group.all_reduce(parts[group.rank].clone()))
    for group in groups:
        group.close()
    right = sum(part.long() for part in parts)
    assert isinstance(right, Tensor)
    for total in found:
        assert total.dtype == torch.int32 and torch.equal(total, right.to(torch.int32))


def _over(transport: str, size: int) -> list[Communicator]:
    address = free_address()
    host, _, port = address.removeprefix("tcp://").rpartition(":")

    def join(rank: int) -> Communicator:
        if transport == "gloo":
            return TorchGroup(address, rank, size, "cpu", PATIENCE)
        return SocketGroup((host, int(port)), rank, size, PATIENCE, b"secret")

    if transport == "shared memory":
        return join_in_threads(size, PATIENCE)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, range(size)))
