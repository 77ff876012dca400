"""keep_allowed: what may not come is taken out of rows, and nothing else changes."""

import numpy as np
import pytest
import torch

from kernels.gpu.sampling.allowed import keep_allowed


@pytest.mark.parametrize("num_tokens", [1, 7, 31, 32, 33, 1000, 1024, 1025, 2500])
def test_what_is_not_allowed_goes_and_nothing_else_changes(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(4, num_tokens, generator=generator)
    logits[1, -1], logits[1, 0] = torch.inf, torch.nan
    shares = torch.tensor([[0.5], [0.1], [1.0], [0.0]])
    may_come = torch.rand(4, num_tokens, generator=generator) < shares
    expected = torch.where(may_come, logits, -torch.inf)
    expected[2] = logits[2]
    rows = [3, 0, 1]
    allowed = [np.packbits(may_come[row].numpy(), bitorder="little") for row in rows]
    keep_allowed(logits, rows, allowed)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
