"""kernels.native elementwise.c: norm, rotation with the KV write, gated activation."""

import pytest
import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch
from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import Step, ThreadPool
from kernels.torch_backend import CpuKernels

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-7, torch.bfloat16: 4e-3}  # one rounding
PAGE = 8


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.fixture(params=[1, 3])
def kernels(request: pytest.FixtureRequest, library: Library) -> NativeKernels:
    return NativeKernels(ThreadPool(library, request.param))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 36, 576])
@pytest.mark.parametrize("has_residual", [False, True])
def test_the_norm_is_that_of_torch(
    kernels: NativeKernels, width: int, dtype: torch.dtype, *, has_residual: bool
) -> None:
    x, weight = randn(40, width, seed=1) * 3, randn(width, seed=2, dtype=dtype)
    residual = randn(40, width, seed=3) if has_residual else None
    out, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    expected, sum_ = CpuKernels().add_rms_norm(x, residual, weight, 1e-5)
    assert (out.dtype, total.dtype) == (dtype, torch.float32)
    assert torch.equal(total, sum_)
    assert error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 40, 1536])
def test_the_activation_is_that_of_float64(
    kernels: NativeKernels, width: int, dtype: torch.dtype
) -> None:
    gate_up = randn(23, 2 * width, seed=1) * 4
    gate, up = gate_up.double().chunk(2, dim=1)
    out = kernels.silu_and_mul(gate_up, dtype)
    assert out.dtype == dtype
    assert error(out, gate * torch.sigmoid(gate) * up) < TOLERANCE[dtype]


def test_the_activation_has_no_trouble_at_the_ends(kernels: NativeKernels) -> None:
    gates = torch.tensor([[-torch.inf, -1e30, -100.0, 0.0, 100.0, 1e30, torch.inf, torch.nan]])
    out = kernels.silu_and_mul(torch.cat((gates, torch.ones(1, 8)), dim=1), torch.float32)[0]
    assert out[7].isnan()
    assert out[1:4].abs().max() < 1e-30 * 1e30 * 1e-6
    assert torch.equal(out[4:7], gates[0, 4:7])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (3, 1, 12), (4, 4, 2)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotation_and_kv_write_are_those_of_torch(
    kernels: NativeKernels,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    has_norm: bool,
) -> None:
    batch = AttentionBatch.build([0, 11, 12], [13, 20], [[2, 0], [3, 5, 4]], PAGE)
    qkv = randn(12, heads + 2 * kv_heads, head_dim, seed=1)
    angles = randn(64, head_dim // 2, seed=2) * 3
    norms = [randn(head_dim, seed=s, dtype=dtype) if has_norm else None for s in (3, 4)]
    pages = [torch.full((6, kv_heads, PAGE, head_dim), 7.0, dtype=dtype) for _ in range(4)]
    q = kernels.rope_and_write(
        qkv, heads, angles.cos(), angles.sin(), Step(12, batch), *pages[:2], *norms, 1e-6
    )
    # In float32, with cosines as the served dtype has them: torch rounds more often in bfloat16.
    wide = [None if norm is None else norm.float() for norm in norms]
    wide_pages = [page.float() for page in pages[2:]]
    cos, sin = (x.to(dtype).float() for x in (angles.cos(), angles.sin()))
    expected = CpuKernels().rope_and_write(qkv, heads, cos, sin, batch, *wide_pages, *wide, 1e-6)
    assert q.dtype == dtype
    assert error(q, expected) < TOLERANCE[dtype]
    for page, wide_page in zip(pages[:2], wide_pages, strict=True):
        assert error(page, wide_page) < TOLERANCE[dtype]
        assert torch.equal(page == 7.0, wide_page == 7.0)  # nothing else is written


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_what_it_is_alone(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, residual, weight = randn(50, 36, seed=1), randn(50, 36, seed=2), randn(36, seed=3).to(dtype)
    gate_up = randn(50, 66, seed=4)
    out, _ = kernels.add_rms_norm(x, residual, weight, 1e-5)
    activated = kernels.silu_and_mul(gate_up, dtype)
    for row in (slice(0, 1), slice(17, 19), slice(49, 50)):
        assert torch.equal(kernels.add_rms_norm(x[row], residual[row], weight, 1e-5)[0], out[row])
        assert torch.equal(kernels.silu_and_mul(gate_up[row], dtype), activated[row])
