"""kernels.gpu.activation: right in float64's eyes, any company."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gpu.activation import (
    gate_heads,
    gelu_tanh_and_mul,
    silu_and_mul,
    swigluoai_and_mul,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 72, 512, 1536, 2048, 2050])
def test_it_agrees_with_float64(intermediate: int, dtype: torch.dtype) -> None:
    gate_up = normal(3, 2 * intermediate, dtype=dtype)
    before = gate_up.clone()
    out = silu_and_mul(gate_up)
    assert out.dtype == dtype and out.shape == (3, intermediate)
    assert error(out, reference.silu_and_mul(gate_up.double())) < TOLERANCE[dtype]
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_rounds_once(dtype: torch.dtype) -> None:
    gate_up = normal(4, 1024, dtype=dtype)
    expected = reference.silu_and_mul(gate_up.double()).to(dtype)
    assert (silu_and_mul(gate_up) != expected).float().mean() < 1e-3


def test_large_gates_do_not_overflow() -> None:
    gate = torch.tensor([-1e30, -1000.0, -100.0, 0.0, 100.0, 1000.0])
    out = silu_and_mul(torch.cat((gate, torch.full((6,), 2.0)))[None])
    assert torch.allclose(out[0], torch.tensor([0.0, 0.0, 0.0, 0.0, 200.0, 2000.0]))


def test_a_strided_row_is_read_where_it_lies() -> None:
    wide = torch.full((5, 200), torch.nan)
    wide[:, 16:160] = normal(5, 144)
    gate_up = wide[:, 16:160]
    assert torch.equal(silu_and_mul(gate_up), silu_and_mul(gate_up.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_is_activated_as_in_any_company(dtype: torch.dtype) -> None:
    gate_up = normal(64, 1200, dtype=dtype)
    gate_up[5] = torch.nan
    whole = silu_and_mul(gate_up)
    assert whole[5].isnan().all() and not whole[6:].isnan().any()
    for count in (1, 2):
        assert torch.equal(silu_and_mul(gate_up[:count]), whole[:count])
    assert torch.equal(silu_and_mul(gate_up[10:27].flip(0)), whole[10:27].flip(0))


def test_no_rows_are_no_work() -> None:
    assert silu_and_mul(torch.empty(0, 144)).shape == (0, 72)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 72, 2050])
def test_the_gate_of_gelu_agrees_with_float64(intermediate: int, dtype: torch.dtype) -> None:
    gate_up = normal(9, 2 * intermediate, dtype=dtype)
    out = gelu_tanh_and_mul(gate_up)
    assert out.dtype == dtype and out.shape == (9, intermediate)
    assert error(out, reference.gelu_tanh_and_mul(gate_up.double())) < TOLERANCE[dtype]
    assert torch.equal(gelu_tanh_and_mul(gate_up[4:5]), out[4:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 72, 2050])
def test_the_clamped_gate_agrees_with_float64(intermediate: int, dtype: torch.dtype) -> None:
    gate_up = 5 * normal(9, 2 * intermediate, dtype=dtype)
    gate_up[3] = torch.nan
    out = swigluoai_and_mul(gate_up, 1.702, 7.0)
    assert out.dtype == dtype and out.shape == (9, intermediate)
    assert out[3].isnan().all()
    rest = [row for row in range(9) if row != 3]
    right = reference.swigluoai_and_mul(gate_up[rest].double(), 1.702, 7.0)
    assert error(out[rest], right) < TOLERANCE[dtype]
    assert torch.equal(swigluoai_and_mul(gate_up[4:5], 1.702, 7.0), out[4:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 24), (4, 256)])
def test_the_gate_behind_attention_agrees_with_float64(
    heads: int, dim: int, dtype: torch.dtype
) -> None:
    x, rows = normal(9, heads, dim, dtype=dtype), normal(9, heads * dim + 3, dtype=dtype)
    gates, before = rows[:, : heads * dim], x.clone()
    gate_heads(x, gates)
    assert error(x, reference.gate_heads(before.double(), gates.double())) < TOLERANCE[dtype]
    alone = before[4:5].clone()
    gate_heads(alone, gates[4:5])
    assert torch.equal(alone, x[4:5])
    gate_heads(x[:0], gates[:0])  # no rows are no work


def test_large_gates_of_gelu_do_not_overflow() -> None:
    gate = torch.tensor([-1e30, -1000.0, -100.0, 0.0, 100.0, 1000.0])
    out = gelu_tanh_and_mul(torch.cat((gate, torch.full((6,), 2.0)))[None])
    assert torch.allclose(out[0], torch.tensor([0.0, 0.0, 0.0, 0.0, 200.0, 2000.0]))
