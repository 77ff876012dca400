"""kernels.gpu.wide_norm: right in float64's eyes, K counted where it is to be, any company."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gpu.wide_norm import square_sums, wide_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
SHAPES = [(9, 3, 64), (4, 1, 96), (3, 3, 16)]  # HQ, HK, D


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_it_norms_q_and_k_by_the_squares_of_all_ranks(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    qkv = normal(9, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = (part.flatten(1) for part in qkv.double().split([heads, kv_heads, kv_heads], dim=1))
    sums = square_sums(qkv, heads, kv_heads, counts_kv=True)
    squares = torch.stack([q.square().sum(1), k.square().sum(1)], dim=1)
    assert error(sums, squares) < 1e-6
    uncounted = square_sums(qkv, heads, kv_heads, counts_kv=False)
    assert torch.equal(uncounted, sums * torch.tensor([1.0, 0.0]))
    assert torch.equal(square_sums(qkv[4:5], heads, kv_heads, counts_kv=True), sums[4:5])

    norms = normal(heads * head_dim, dtype=dtype), normal(kv_heads * head_dim)
    widths = heads * head_dim, kv_heads * head_dim
    alone = qkv[4:5].clone()
    wide_norm(qkv, sums, *norms, widths, 1e-5)
    expected = [reference.rms_norm(x, w.double(), 1e-5) for x, w in zip((q, k), norms, strict=True)]
    assert error(qkv.flatten(1), torch.cat([*expected, v], dim=1)) < TOLERANCE[dtype]
    assert torch.equal(qkv[:, heads + kv_heads :].flatten(1).double(), v)
    wide_norm(alone, sums[4:5], *norms, widths, 1e-5)
    assert torch.equal(alone, qkv[4:5])


def test_rows_may_lie_apart() -> None:
    wide = torch.full((4, 20, 64), torch.nan)
    wide[:, :15] = normal(4, 15, 64)
    apart, packed = wide[:, :15], wide[:, :15].contiguous()
    sums = square_sums(apart, 9, 3, counts_kv=True)
    assert torch.equal(sums, square_sums(packed, 9, 3, counts_kv=True))
    for qkv in (apart, packed):
        wide_norm(qkv, sums, normal(576), normal(192), (576, 192), 1e-5)
    assert torch.equal(apart, packed) and wide[:, 15:].isnan().all()


def test_no_rows_are_no_work() -> None:
    assert square_sums(torch.empty(0, 15, 64), 9, 3, counts_kv=True).shape == (0, 2)
    wide_norm(torch.empty(0, 15, 64), torch.empty(0, 2), normal(576), normal(192), (1, 1), 1e-5)
