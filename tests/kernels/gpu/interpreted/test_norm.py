"""kernels.gpu.norm: right in float64's eyes, rounded once, any company."""

import pytest
import torch
from torch import Tensor

from kernels import elementwise, reference
from kernels.gpu.norm import add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 72, 576, 1536, 4096])
def test_norms_agree_with_float64(hidden: int, dtype: torch.dtype) -> None:
    x, residual = normal(3, hidden, dtype=dtype), normal(4, hidden)[:3]
    weight = normal(hidden, dtype=dtype)
    for eps in (1e-6, 0.5):
        expected = reference.rms_norm(x.double(), weight.double(), eps)
        out, _ = add_rms_norm(x, None, weight, eps)
        assert out.dtype == dtype and error(out, expected) < TOLERANCE[dtype]
        expected = reference.rms_norm((x + residual).double(), weight.double(), eps)
        normed, total = add_rms_norm(x, residual, weight, eps)
        assert normed.dtype == dtype and error(normed, expected) < TOLERANCE[dtype]
        assert total.dtype == torch.float32 and torch.equal(total, x.float() + residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_residual_it_counts_as_zero(dtype: torch.dtype) -> None:
    x, weight = normal(3, 72, dtype=dtype), normal(72, dtype=dtype)
    normed, total = add_rms_norm(x, None, weight, 1e-5)
    assert torch.equal(total, x.float())
    zero, _ = add_rms_norm(x, torch.zeros(3, 72), weight, 1e-5)
    assert torch.equal(normed, zero)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_rows_meet_weights_of_another_dtype(dtype: torch.dtype) -> None:
    """After an all-reduce x is in float32; it is not rounded on its way."""
    x, residual, weight = normal(3, 576), normal(4, 576)[:3], normal(576, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert normed.dtype == dtype and torch.equal(total, x + residual)
    expected = reference.rms_norm(total.double(), weight.double(), 1e-5)
    assert error(normed, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_differs_from_the_cpus_by_little_more_than_its_rounding(dtype: torch.dtype) -> None:
    """A sum in another order moves a few results to the next number; two roundings move many."""
    x, residual, weight = normal(8, 576, dtype=dtype), normal(9, 576)[:8], normal(576, dtype=dtype)
    normed, _ = add_rms_norm(x, residual, weight, 1e-5)
    expected, _ = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.allclose(normed, expected, rtol=torch.finfo(dtype).eps * 4, atol=0)
    if dtype != torch.float32:
        assert (normed != expected).float().mean() < 1e-2


def test_a_strided_row_is_read_where_it_lies() -> None:
    wide = torch.full((5, 200), torch.nan)
    wide[:, 16:88] = normal(5, 72)
    x, weight = wide[:, 16:88], normal(72)
    lying, _ = add_rms_norm(x, None, weight, 1e-5)
    moved, _ = add_rms_norm(x.contiguous(), None, weight, 1e-5)
    assert torch.equal(lying, moved)
    heads = wide.view(5, 25, 8)[:, 2]
    normed, _ = add_rms_norm(heads, None, normal(8), 1e-5)
    assert torch.equal(normed[1:2], add_rms_norm(heads[1:2].contiguous(), None, normal(8), 1e-5)[0])


def test_a_row_of_nan_or_infinity_stays_alone() -> None:
    x, weight = normal(4, 72), normal(72)
    clean, _ = add_rms_norm(x, None, weight, 1e-5)
    x[1], x[2, 3] = torch.nan, torch.nan
    normed, _ = add_rms_norm(x, None, weight, 1e-5)
    assert normed[1].isnan().all() and normed[2].isnan().all()
    assert torch.equal(normed[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_is_normed_as_in_any_company(dtype: torch.dtype) -> None:
    x, residual = normal(64, 576, dtype=dtype), normal(65, 576)[:64]
    weight = normal(576, dtype=dtype)
    whole, totals = add_rms_norm(x, residual, weight, 1e-5)
    for count in (1, 2, 17):
        normed, total = add_rms_norm(x[:count], residual[:count], weight, 1e-5)
        assert torch.equal(normed, whole[:count]) and torch.equal(total, totals[:count])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    normed, total = add_rms_norm(x[order], residual[order], weight, 1e-5)
    assert torch.equal(normed, whole[order]) and torch.equal(total, totals[order])


def test_no_rows_are_no_work() -> None:
    normed, total = add_rms_norm(torch.empty(0, 72), None, normal(72), 1e-5)
    assert normed.shape == total.shape == (0, 72)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_weight_the_sum_is_rounded(dtype: torch.dtype) -> None:
    x, residual = normal(3, 72, dtype=dtype), normal(4, 72)[:3]
    out, total = add_rms_norm(x, residual, None, 1e-5, dtype)
    assert torch.equal(total, x.float() + residual) and torch.equal(out, total.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_a_block_has_the_blocks_dtype(dtype: torch.dtype) -> None:
    x, weight = normal(9, 576, dtype=dtype), normal(576)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert error(out, expected) < TOLERANCE[dtype]
    assert torch.equal(rms_norm(x[4:5], weight, 1e-5), out[4:5])
    normed, _ = add_rms_norm(x, None, weight, 1e-5, dtype)
    assert torch.equal(normed, out)
