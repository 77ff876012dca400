"""kernels.native elementwise.c and wide_norm.c: norms, rotation with the KV write, gates."""

import pytest
import torch
from torch import Tensor

from kernels import reference
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
        qkv, heads, angles.cos(), angles.sin(), Step(12, batch), *pages[:2], *norms, 1e-6, dtype
    )
    # In float32, with cosines as the served dtype has them: torch rounds more often in bfloat16.
    wide = [None if norm is None else norm.float() for norm in norms]
    wide_pages = [page.float() for page in pages[2:]]
    cos, sin = (x.to(dtype).float() for x in (angles.cos(), angles.sin()))
    expected = CpuKernels().rope_and_write(
        qkv, heads, cos, sin, batch, *wide_pages, *wide, 1e-6, torch.float32
    )
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 40, 1536])
def test_the_gate_of_gelu_is_that_of_float64(
    kernels: NativeKernels, width: int, dtype: torch.dtype
) -> None:
    gate_up = randn(23, 2 * width, seed=1) * 4
    out = kernels.gelu_tanh_and_mul(gate_up, dtype)
    assert out.dtype == dtype
    assert error(out, reference.gelu_tanh_and_mul(gate_up.double())) < TOLERANCE[dtype]
    assert torch.equal(kernels.gelu_tanh_and_mul(gate_up[7:9], dtype), out[7:9])


def test_the_gate_of_gelu_has_no_trouble_at_the_ends(kernels: NativeKernels) -> None:
    gates = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30, torch.inf, torch.nan]])
    out = kernels.gelu_tanh_and_mul(torch.cat((gates, torch.ones(1, 7)), dim=1), torch.float32)[0]
    assert out[6].isnan()
    assert out[:3].abs().max() < 1e-6
    assert torch.equal(out[3:6], gates[0, 3:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (4, 10), (6, 256)])
def test_the_gate_behind_attention_is_that_of_float64(
    kernels: NativeKernels, heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Its numbers lie before others in a row, as in the product that makes them."""
    attended, rows = randn(23, heads, dim, seed=1, dtype=dtype), randn(23, heads * dim + 7, seed=2)
    gates, out, part = 4 * rows[:, :-7], attended.clone(), attended[7:9].clone()
    rows[:, :-7] = gates
    kernels.gate_heads(out, rows[:, :-7])
    assert error(out, reference.gate_heads(attended.double(), gates.double())) < TOLERANCE[dtype]
    kernels.gate_heads(part, rows[7:9, :-7])
    assert torch.equal(part, out[7:9])


def test_the_gate_behind_attention_has_no_trouble_at_the_ends(kernels: NativeKernels) -> None:
    gates = torch.tensor([[-torch.inf, -1e30, -100.0, 0.0, 100.0, 1e30, torch.inf, torch.nan]])
    x = torch.full((1, 2, 4), 2.0)
    kernels.gate_heads(x, gates)
    assert x.flatten()[7].isnan()
    assert torch.allclose(x.flatten()[:7], torch.tensor([0.0, 0, 0, 1, 2, 2, 2]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_q_k_and_v_may_lie_behind_gates_in_a_row(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    heads, kv_heads, head_dim, gates = 6, 2, 12, 72
    batch = AttentionBatch.build([0, 11, 12], [13, 20], [[2, 0], [3, 5, 4]], PAGE)
    rows = randn(12, gates + (heads + 2 * kv_heads) * head_dim, seed=1)
    angles = randn(64, head_dim // 2, seed=2) * 3
    found = []
    for qkv in (rows[:, gates:], rows[:, gates:].contiguous()):
        pages = [torch.full((6, kv_heads, PAGE, head_dim), 7.0, dtype=dtype) for _ in range(2)]
        cos, sin, step = angles.cos(), angles.sin(), Step(12, batch)
        q = kernels.rope_and_write(
            qkv.unflatten(1, (-1, head_dim)), heads, cos, sin, step, *pages, None, None, 1e-6, dtype
        )
        found.append([q.clone(), *pages])
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 40, 1536])
def test_the_clamped_gate_is_that_of_float64(
    kernels: NativeKernels, width: int, dtype: torch.dtype
) -> None:
    gate_up = randn(23, 2 * width, seed=1) * 6
    out = kernels.swigluoai_and_mul(gate_up, dtype, 1.702, 7.0)
    assert out.dtype == dtype
    assert error(out, reference.swigluoai_and_mul(gate_up.double(), 1.702, 7.0)) < TOLERANCE[dtype]
    assert torch.equal(kernels.swigluoai_and_mul(gate_up[7:9], dtype, 1.702, 7.0), out[7:9])


def test_the_clamped_gate_cuts_what_is_over_its_limit(kernels: NativeKernels) -> None:
    gates = torch.tensor([[-1e30, -100.0, 0.0, 100.0, torch.inf, torch.nan, 1.0, 1.0, 1.0]])
    ups = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, torch.nan, -1e30, torch.inf]])
    rows = torch.cat((gates, ups), dim=1)
    out = kernels.swigluoai_and_mul(rows, torch.float32, 1.0, 7.0)[0]
    assert out[5:7].isnan().all() and out[:3].abs().max() < 1e-6
    seven, one = (x * torch.sigmoid(torch.tensor(x)) for x in (7.0, 1.0))
    assert torch.allclose(out[3:5], 2 * seven) and torch.allclose(out[7], -6 * one)
    assert torch.allclose(out[8], 8 * one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 36, 576])
def test_the_sum_alone_and_the_norm_of_a_block_are_those_of_torch(
    kernels: NativeKernels, width: int, dtype: torch.dtype
) -> None:
    x, residual, weight = (
        randn(40, width, seed=1) * 3,
        randn(40, width, seed=3),
        randn(width, seed=2),
    )
    out, total = kernels.add_rms_norm(x, residual, None, 1e-5, dtype)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, (x + residual).to(dtype))
    normed = kernels.rms_norm(x, weight.to(dtype), 1e-5)
    assert normed.dtype == torch.float32
    assert error(normed, CpuKernels().rms_norm(x, weight.to(dtype), 1e-5)) < 3e-7
    assert torch.equal(kernels.rms_norm(x[17:19], weight.to(dtype), 1e-5), normed[17:19])


def test_weights_of_norms_may_be_wider_than_what_is_normed(kernels: NativeKernels) -> None:
    x, residual, weight = randn(9, 36, seed=1), randn(9, 36, seed=3), randn(36, seed=2) + 1
    out, _ = kernels.add_rms_norm(x, residual, weight, 1e-5, torch.bfloat16)
    expected = reference.rms_norm((x + residual).double(), weight.double(), 1e-5)
    assert out.dtype == torch.bfloat16
    assert error(out, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (3, 1, 12), (4, 4, 2)])
def test_wide_norms_take_the_squares_of_all_ranks(
    kernels: NativeKernels, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    qkv = randn(40, heads + 2 * kv_heads, head_dim, seed=1)
    q_norm, k_norm = (randn(n * head_dim, seed=n, dtype=dtype) for n in (heads, kv_heads))
    sums = kernels.square_sums(qkv, heads, kv_heads, counts_kv=True)
    q, k, _ = qkv.double().split([heads, kv_heads, kv_heads], dim=1)
    squares = torch.stack([q.flatten(1).square().sum(1), k.flatten(1).square().sum(1)], dim=1)
    assert error(sums, squares) < 3e-7
    elsewhere = kernels.square_sums(qkv, heads, kv_heads, counts_kv=False)
    assert torch.equal(elsewhere, sums * torch.tensor([1.0, 0.0]))
    widths = (2 * heads * head_dim, kv_heads * head_dim)  # as if another rank had as many heads
    normed, alone = qkv.clone(), qkv[5:6].clone()
    kernels.wide_norm(normed, 2 * sums, q_norm, k_norm, widths, 1e-5)
    expected = [
        reference.rms_norm(q.flatten(1), q_norm.double(), 1e-5),
        k.flatten(1) * (2 * squares[:, 1:] / widths[1] + 1e-5).rsqrt() * k_norm.double(),
        qkv[:, heads + kv_heads :].flatten(1).double(),
    ]
    assert error(normed.flatten(1), torch.cat(expected, dim=1)) < 3e-7
    kernels.wide_norm(alone, 2 * sums[5:6], q_norm, k_norm, widths, 1e-5)
    assert torch.equal(alone, normed[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 96), (16, 12), (96, 24)])
def test_a_part_of_a_head_may_rotate_alone(
    kernels: NativeKernels, head_dim: int, rotary_dim: int, dtype: torch.dtype, *, has_norm: bool
) -> None:
    batch = AttentionBatch.build([0, 11, 12], [13, 20], [[2, 0], [3, 5, 4]], PAGE)
    qkv = randn(12, 7, head_dim, seed=1)
    angles = randn(64, rotary_dim // 2, seed=2) * 3
    norms = [randn(head_dim, seed=s) if has_norm else None for s in (3, 4)]
    pages = [torch.full((6, 2, PAGE, head_dim), 7.0, dtype=dtype) for _ in range(4)]
    q = kernels.rope_and_write(
        qkv, 3, angles.cos(), angles.sin(), Step(12, batch), *pages[:2], *norms, 1e-6, dtype
    )
    wide_pages = [page.float() for page in pages[2:]]
    cos, sin = (x.to(dtype).float() for x in (angles.cos(), angles.sin()))
    expected = CpuKernels().rope_and_write(
        qkv, 3, cos, sin, batch, *wide_pages, *norms, 1e-6, torch.float32
    )
    assert error(q, expected) < TOLERANCE[dtype]
    for page, wide_page in zip(pages[:2], wide_pages, strict=True):
        assert error(page, wide_page) < TOLERANCE[dtype]
    if not has_norm:
        assert torch.equal(q[..., rotary_dim:], qkv[:, :3, rotary_dim:].to(dtype))


def test_a_number_of_any_bits_is_rounded_as_torch_rounds_it(kernels: NativeKernels) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, head_dim = 5 * PAGE, 48
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, 3, head_dim), generator=generator)
    bits[1::2] &= 0x80FFFFFF  # every other row has many numbers near 2^-126, below it, and zeros
    qkv = bits.to(torch.int32).view(torch.float32)
    batch = AttentionBatch.build([0, rows], [rows], [list(range(5))], PAGE)
    k_pages, v_pages = (torch.zeros(5, 1, PAGE, head_dim, dtype=torch.bfloat16) for _ in range(2))
    angles = torch.zeros(rows, head_dim // 2)
    where = angles.cos(), angles.sin(), Step(rows, batch)
    kernels.rope_and_write(qkv, 1, *where, k_pages, v_pages, None, None, 1e-6, torch.bfloat16)
    written, expected = v_pages.flatten(0, 2), qkv[:, 2].bfloat16()
    is_nan = expected.isnan()
    assert is_nan.any() and (expected[1::2].abs() < 2.0**-126).any()
    assert torch.equal(written.isnan(), is_nan)
    assert torch.equal(written.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])


def apart(x: Tensor) -> Tensor:
    """Return the same rows with other numbers between them, as a product may leave them."""
    return torch.cat([x, torch.full((x.shape[0], 16), torch.nan)], dim=1)[:, : x.shape[1]]


def test_rows_of_products_may_lie_apart(kernels: NativeKernels) -> None:
    gate_up, logits = randn(23, 256, seed=1), randn(23, 512, seed=2)
    for gate in (kernels.silu_and_mul, kernels.gelu_tanh_and_mul):
        assert torch.equal(gate(apart(gate_up), torch.float32), gate(gate_up, torch.float32))
    for found, expected in zip(kernels.argmax(apart(logits)), kernels.argmax(logits), strict=True):
        assert torch.equal(found, expected)


def test_wide_norms_are_of_rows_that_may_lie_apart(kernels: NativeKernels) -> None:
    heads, kv_heads, head_dim = 4, 2, 32
    together = randn(9, (heads + 2 * kv_heads) * head_dim, seed=1)
    q_norm, k_norm = randn(heads * head_dim, seed=2), randn(kv_heads * head_dim, seed=3)
    normed = []
    for rows in (together.clone(), apart(together)):
        qkv = rows.unflatten(1, (-1, head_dim))
        sums = kernels.square_sums(qkv, heads, kv_heads, counts_kv=True)
        kernels.wide_norm(qkv, sums, q_norm, k_norm, (len(q_norm), len(k_norm)), 1e-5)
        normed.append(rows)
    assert torch.equal(*normed) and not torch.equal(normed[0], together)
