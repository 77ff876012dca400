"""kernels.sampling: rows that no token can be drawn from, and log-probabilities.

Of tokens and of the best ones the CPU's form and the GPU's say the same.
"""

import pytest
import torch
from torch import Tensor

from kernels.gpu.sampling import logprobs as gpu
from kernels.sampling import RowSampling, sample_rows, token_logprobs

Logprobs = tuple[Tensor, Tensor, Tensor]

SAMPLINGS = {
    "greedy": RowSampling(0.0, 0, 1.0, 0.0, 1),
    "full": RowSampling(1.0, 0, 1.0, 0.0, 1),
    "top_k": RowSampling(0.7, 5, 1.0, 0.0, 1),
    "top_k and top_p": RowSampling(0.7, 5, 0.9, 0.0, 1),
    "top_p": RowSampling(1.0, 0, 0.9, 0.0, 1),
    "min_p": RowSampling(1.0, 0, 1.0, 0.05, 1),
}


def rows_of(spoilt: float) -> Tensor:
    """Return rows of which one holds such a number, one nothing else, and one is right."""
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(3))
    logits[0, 77] = spoilt
    logits[1] = spoilt
    return logits


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_some_token_and_changes_no_other(
    spoilt: float, kind: str
) -> None:
    logits, draws, positions = rows_of(spoilt), [SAMPLINGS[kind]] * 3, [2] * 3
    drawn = sample_rows(logits, draws, positions)
    assert drawn.dtype == torch.int64
    assert ((drawn >= 0) & (drawn < 1000)).all()
    assert drawn[2] == sample_rows(logits[2:], draws[2:], positions[2:])[0]


def both(
    logits: Tensor, rows: list[int], token_ids: Tensor, counts: list[int]
) -> tuple[Logprobs, Logprobs]:
    cpu = token_logprobs(logits, rows, token_ids, counts)
    return cpu, gpu.token_logprobs(logits, torch.tensor(rows), token_ids, max(counts))


def best_of(logprobs: Logprobs, place: int, count: int) -> list[tuple[int, float]]:
    ids, values = logprobs[1][place, :count].tolist(), logprobs[2][place, :count].tolist()
    return [(i, value) for i, value in zip(ids, values, strict=True) if value != -torch.inf]


@pytest.mark.parametrize("spread", [0.0, 0.1, 5.0, 80.0])
def test_both_forms_tell_the_same_best_tokens_with_the_lower_id_of_equals(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(40, 700, generator=generator) * spread).round(decimals=1)
    logits[:, ::3] = -torch.inf
    token_ids = torch.randint(0, 700, (40,), generator=generator)
    rows, counts = list(range(39, 2, -1)), [i % 22 for i in range(37)]
    cpu, of_gpu = both(logits, rows, token_ids, counts)
    assert torch.equal(cpu[0], of_gpu[0])
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        expected = torch.log_softmax(logits[row], 0)
        assert cpu[0][place] == expected[token_ids[row]]
        values, order = expected.sort(descending=True, stable=True)
        wanted = list(zip(order.tolist(), values.tolist(), strict=True))[:count]
        assert best_of(cpu, place, count) == best_of(of_gpu, place, count) == wanted


def test_fewer_tokens_than_are_asked_for_are_told_as_they_are() -> None:
    logits = torch.full((2, 9), -torch.inf)
    logits[0, [4, 7]] = torch.tensor([1.0, 2.0])
    logits[1] = torch.arange(9.0)
    for logprobs in both(logits, [0, 1], torch.tensor([7, 0]), [20, 20]):
        assert [i for i, _ in best_of(logprobs, 0, 20)] == [7, 4]
        assert [i for i, _ in best_of(logprobs, 1, 20)] == list(range(8, -1, -1))


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_logprobs_of_rows_that_are_not_finite_do_not_disturb_others(spoilt: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    clean = both(logits.clone(), [2], torch.tensor([1, 1, 1]), [5])
    logits[0, 3] = spoilt
    logits[1] = spoilt
    for logprobs, (chosen, *best) in zip(
        both(logits, [0, 1, 2], torch.tensor([1, 1, 1]), [5, 5, 5]), clean, strict=True
    ):
        assert logprobs[0][2] == chosen[0]
        for part, wanted in zip(logprobs[1:], best, strict=True):
            assert torch.equal(part[2], wanted[0])
