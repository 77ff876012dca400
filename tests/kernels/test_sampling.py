"""kernels.sampling: rows that no token can be drawn from."""

import pytest
import torch
from torch import Tensor

from kernels.sampling import Draw, draw_rows

DRAWS = {
    "greedy": Draw(0.0, 0, 1.0, 0.0, 1, 2),
    "full": Draw(1.0, 0, 1.0, 0.0, 1, 2),
    "top_k": Draw(0.7, 5, 1.0, 0.0, 1, 2),
    "top_k and top_p": Draw(0.7, 5, 0.9, 0.0, 1, 2),
    "top_p": Draw(1.0, 0, 0.9, 0.0, 1, 2),
    "min_p": Draw(1.0, 0, 1.0, 0.05, 1, 2),
}


def rows_of(spoilt: float) -> Tensor:
    """Return rows of which one holds such a number, one nothing else, and one is right."""
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(3))
    logits[0, 77] = spoilt
    logits[1] = spoilt
    return logits


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_some_token_and_changes_no_other(
    spoilt: float, kind: str
) -> None:
    logits, draws = rows_of(spoilt), [DRAWS[kind]] * 3
    drawn = draw_rows(logits, draws)
    assert drawn.dtype == torch.int64
    assert ((drawn >= 0) & (drawn < 1000)).all()
    assert drawn[2] == draw_rows(logits[2:], draws[2:])[0]
