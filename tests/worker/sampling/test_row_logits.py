"""row_logits: the argmax of parts is the argmax of the whole, and a greedy row tells no more."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.torch_backend import CpuKernels
from worker.distributed.communicator import Communicator
from worker.distributed.thread_group import ThreadGroup
from worker.protocol import SamplingParams
from worker.sampling.row_logits import RowLogits
from worker.sampling.sampler import FAILED, SampledRows, Sampler, SampleRequest
from worker.sampling.sequence_sampling import SequenceSampling

KERNELS = CpuKernels()
LOGITS = st.sampled_from([0.0, -0.0, 1.0, 1.5, -3.0, torch.inf, -torch.inf, torch.nan])

Found = TypeVar("Found")


class Watched:
    """A rank's place in a group that notes how many numbers of each row are gathered."""

    def __init__(self, place: Communicator, gathered: list[int]) -> None:
        self._place = place
        self._gathered = gathered
        self.rank, self.size = place.rank, place.size
        self.all_reduce, self.close = place.all_reduce, place.close

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        if self.rank == 0:
            self._gathered.append(sum(widths))
        return self._place.gather_first(x, widths)


def on_ranks(
    logits: Tensor, widths: Sequence[int], ask: Callable[[RowLogits], Found]
) -> tuple[list[Found], list[int]]:
    """Return what each rank is told, and how much of each row was gathered each time."""
    gathered: list[int] = []
    places = ThreadGroup(len(widths)).communicators()
    parts = torch.split(logits, list(widths), dim=1)

    def one(place: Communicator) -> Found:
        own = parts[place.rank].contiguous()
        return ask(RowLogits(own, widths, Watched(place, gathered), KERNELS))

    with ThreadPoolExecutor(len(widths)) as threads:
        return list(threads.map(one, places)), gathered


def requests(*params: SamplingParams) -> list[SampleRequest]:
    samplings = [SequenceSampling.of(of_row) for of_row in params]
    return [SampleRequest(row, of_row, 4, 4, ()) for row, of_row in enumerate(samplings)]


def sample(
    logits: Tensor, widths: Sequence[int], params: Sequence[SamplingParams]
) -> tuple[list[int], list[int]]:
    """Return the tokens that rank 0 draws, and how much of each row was gathered each time."""

    def ask(logits: RowLogits) -> SampledRows | None:
        return Sampler(KERNELS).sample(logits, requests(*params))

    (sampled, *others), gathered = on_ranks(logits, widths, ask)
    assert sampled is not None and others == [None] * len(others)
    return sampled.token_ids.tolist(), gathered


@given(
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    numbers=st.lists(LOGITS, min_size=48, max_size=48),
    num_rows=st.integers(1, 3),
)
def test_the_best_of_parts_is_the_best_of_the_whole(
    widths: list[int], numbers: list[float], num_rows: int
) -> None:
    logits = torch.tensor(numbers)[: num_rows * sum(widths)].view(num_rows, -1)
    values, ids = KERNELS.argmax(logits)
    (argmax, *others), _ = on_ranks(logits, widths, RowLogits.argmax)
    assert argmax is not None and others == [None] * len(others)
    assert torch.equal(argmax[0].nan_to_num(9.0), values.nan_to_num(9.0))
    assert torch.equal(argmax[1], ids)


def test_ids_of_a_large_vocabulary_are_told_exactly() -> None:
    logits = torch.zeros(1, 2**24)
    logits[0, -1] = 1.0
    (argmax, _), _ = on_ranks(logits, [2**23, 2**23], RowLogits.argmax)
    assert argmax is not None and argmax[1].tolist() == [2**24 - 1]


def test_greedy_rows_gather_two_numbers_of_each_rank_and_others_all_logits() -> None:
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(1))
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(seed=5)
    token_ids, gathered = sample(logits, [5, 4, 3], [greedy, greedy])
    assert (token_ids, gathered) == (logits.argmax(dim=1).tolist(), [6])
    token_ids, gathered = sample(logits, [5, 4, 3], [greedy, sampled])
    assert gathered == [6, 12]
    assert token_ids == sample(logits, [12], [greedy, sampled])[0]


def test_a_row_that_is_not_finite_on_one_rank_has_no_token() -> None:
    logits = torch.zeros(3, 6)
    logits[1, 4], logits[2, :] = torch.nan, -torch.inf
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, [3, 3], [greedy] * 3)[0] == [0, FAILED, FAILED]
