"""prompt_scorer: where a token stands among all others, from logits that are whole."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kernels.torch_backend import CpuKernels
from worker.engine.prompt_scorer import ROWS_AT_ONCE, PromptScorer, Target
from worker.models.forward_batch import InputBatch


class Whole:
    """Logits that one rank has all of."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def whole(self) -> Tensor:
        return self._logits


class Head:
    """A model whose hidden states are its logits, with adapters that have no head."""

    def hidden_logits(self, hidden: Tensor, rows: list[int], heads: object) -> Tensor:
        return hidden

    def row_logits(self, part: Tensor) -> Whole:
        return Whole(part)

    def heads(self, runs: object) -> None:
        return None


def scored(logits: Tensor, targets: list[Target]) -> list[Any]:
    head: Any = Head()
    rows: Any = type("Rows", (), {"runs": (), "hidden_rows": list(range(len(logits)))})()
    found = PromptScorer(head, head, CpuKernels()).score(logits, cast(InputBatch, rows), targets)
    assert found is not None
    of_sequences, failed = found.read()
    assert failed == frozenset()
    return [entry for one in of_sequences for entry in one.of_targets]


def test_a_rank_counts_the_tokens_that_are_no_less_likely() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -1.0]])
    ranks = [scored(logits, [Target(7, 0, token, 1)])[0][2] for token in range(5)]
    assert ranks == [4, 2, 3, 2, 5]


@pytest.mark.parametrize("num_best", [0, 3])
def test_ranks_of_many_rows_are_those_of_each_alone(num_best: int) -> None:
    logits = torch.randn(ROWS_AT_ONCE + 9, 50, generator=torch.Generator().manual_seed(4))
    targets = [Target(row // 40, row, row * 7 % 50, num_best) for row in range(len(logits))]
    together = scored(logits, targets)
    order = logits.argsort(dim=1, descending=True)
    for target, (logprob, top, rank) in zip(targets, together, strict=True):
        assert int(order[target.row, rank - 1]) == target.token_id
        assert logprob == pytest.approx(float(logits[target.row].log_softmax(0)[target.token_id]))
        assert [token for token, _ in top] == order[target.row, :num_best].tolist()
