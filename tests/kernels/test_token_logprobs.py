"""Log-probabilities of tokens and of the best ones: the CPU's form and the GPU's say the same."""

import pytest
import torch
from torch import Tensor

from kernels.gpu.sampling import logprobs as gpu
from kernels.sampling import token_logprobs

Found = tuple[Tensor, Tensor, Tensor]


def both(
    logits: Tensor, rows: list[int], token_ids: Tensor, counts: list[int]
) -> tuple[Found, Found]:
    here = token_logprobs(logits, rows, token_ids, counts)
    return here, gpu.token_logprobs(logits, torch.tensor(rows), token_ids, max(counts))


def best_of(found: Found, place: int, count: int) -> list[tuple[int, float]]:
    ids, values = found[1][place, :count].tolist(), found[2][place, :count].tolist()
    return [(i, value) for i, value in zip(ids, values, strict=True) if value != -torch.inf]


@pytest.mark.parametrize("spread", [0.0, 0.1, 5.0, 80.0])
def test_both_forms_tell_the_same_best_tokens_with_the_lower_id_of_equals(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(40, 700, generator=generator) * spread).round(decimals=1)
    logits[:, ::3] = -torch.inf
    token_ids = torch.randint(0, 700, (40,), generator=generator)
    rows, counts = list(range(39, 2, -1)), [i % 22 for i in range(37)]
    here, there = both(logits, rows, token_ids, counts)
    assert torch.equal(here[0], there[0])
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        expected = torch.log_softmax(logits[row], 0)
        assert here[0][place] == expected[token_ids[row]]
        values, order = expected.sort(descending=True, stable=True)
        wanted = list(zip(order.tolist(), values.tolist(), strict=True))[:count]
        assert best_of(here, place, count) == best_of(there, place, count) == wanted


def test_fewer_tokens_than_are_asked_for_are_told_as_they_are() -> None:
    logits = torch.full((2, 9), -torch.inf)
    logits[0, [4, 7]] = torch.tensor([1.0, 2.0])
    logits[1] = torch.arange(9.0)
    for found in both(logits, [0, 1], torch.tensor([7, 0]), [20, 20]):
        assert [i for i, _ in best_of(found, 0, 20)] == [7, 4]
        assert [i for i, _ in best_of(found, 1, 20)] == list(range(8, -1, -1))


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_do_not_disturb_others(spoilt: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    clean = both(logits.clone(), [2], torch.tensor([1, 1, 1]), [5])
    logits[0, 3] = spoilt
    logits[1] = spoilt
    for found, (chosen, *best) in zip(
        both(logits, [0, 1, 2], torch.tensor([1, 1, 1]), [5, 5, 5]), clean, strict=True
    ):
        assert found[0][2] == chosen[0]
        for part, wanted in zip(found[1:], best, strict=True):
            assert torch.equal(part[2], wanted[0])
