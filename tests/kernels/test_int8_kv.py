"""K and V in int8: near to what they were, whatever stands beside them, and NaN where that was."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention import AttentionBatch, paged_attention, write_kv
from kernels.int8_kv import SCALE_BYTES, dequantize_rows, quantize_rows
from kernels.quantized import LARGEST_CODE

DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 2**31),
    head_dim=st.integers(1, 130),
    exponent=st.integers(-90, 120),
)
def test_a_number_is_off_by_half_a_step_at_most(seed: int, head_dim: int, exponent: int) -> None:
    x = randn(5, head_dim, seed=seed).clamp(-8, 8).double() * 2.0**exponent
    rows = quantize_rows(x.float())
    assert rows.shape == (5, head_dim + SCALE_BYTES)
    assert rows[:, :head_dim].int().abs().max() <= LARGEST_CODE
    step = rows[:, head_dim:].contiguous().view(torch.bfloat16).double()
    off = (dequantize_rows(rows, torch.float32).double() - x).abs()
    assert bool((off <= step * 0.5001).all())
    assert bool((step * LARGEST_CODE <= x.abs().amax(1, keepdim=True) * 1.01).all())


def test_what_is_no_number_makes_its_own_row_nan_and_nothing_at_all_is_zeros() -> None:
    x = randn(6, 16)
    x[1], x[2, 3], x[3, 4], x[4] = 0.0, torch.nan, -torch.inf, 2.0**-101
    back = dequantize_rows(quantize_rows(x), torch.float32)
    assert back[2].isnan().all() and back[3].isnan().all()
    assert torch.equal(back[[1, 4]], torch.zeros(2, 16))
    for row in (0, 5):
        assert torch.equal(back[row], dequantize_rows(quantize_rows(x[row]), torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_attention_is_that_over_what_rows_stand_for(head_dim: int, dtype: torch.dtype) -> None:
    batch = AttentionBatch.build([0, 30, 31], [30, 45], [[2, 0], [3, 5, 4]], 16)
    k, v = (randn(31, 2, head_dim, seed=seed).to(dtype) for seed in (1, 2))
    kept = [torch.zeros(6, 2, 16, head_dim + SCALE_BYTES, dtype=torch.int8) for _ in range(2)]
    write_kv(k, v, kept[0], kept[1], batch.kv_loc)
    assert torch.equal(kept[1][2, :, 3], quantize_rows(v[3]))
    widened = [dequantize_rows(pages, dtype) for pages in kept]
    q = randn(31, 6, head_dim, seed=3).to(dtype)
    found = paged_attention(q, kept[0], kept[1], batch, 0.3)
    assert torch.equal(found, paged_attention(q, widened[0], widened[1], batch, 0.3))
