"""keep_allowed: by C and torch, what may not come is taken out of rows."""

import numpy as np
import pytest
import torch

from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import ThreadPool
from kernels.torch_backend import CpuKernels


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 1000, 49152])
def test_what_is_not_allowed_goes_and_nothing_else_changes(
    library: Library, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(3, num_tokens, generator=generator)
    logits[1, -1], logits[1, 0] = torch.inf, torch.nan
    # Runs of bits that are equal, and others.
    share = torch.randint(0, 5, (num_tokens // 16 + 1,), generator=generator).repeat_interleave(16)
    may_come = torch.rand(num_tokens, generator=generator) < share[:num_tokens] / 4
    expected = torch.where(may_come, logits[1], -torch.inf)
    allowed = np.packbits(may_come.numpy(), bitorder="little")
    for kernels in NativeKernels(ThreadPool(library, 1)), CpuKernels():
        changed = logits.clone()
        kernels.keep_allowed(changed, [1], [allowed])
        torch.testing.assert_close(changed[1], expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(changed[[0, 2]], logits[[0, 2]], rtol=0, atol=0)
