"""kernels.gpu.rope: q rotated, K and V where kv_loc says and nowhere else."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gpu.rope import rope_and_write

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
SHAPES = [(9, 3, 64), (4, 1, 96), (8, 2, 128), (1, 1, 72), (3, 3, 16)]  # HQ, HK, D
PAGE, NUM_PAGES = 4, 6


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def rope_tables(max_position: int, head_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(max_position), frequencies)
    return angles.cos(), angles.sin()


def empty_pages(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (NUM_PAGES, num_kv_heads, PAGE, head_dim)
    return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)


def run(
    qkv: Tensor, num_heads: int, positions: Tensor, kv_loc: Tensor, norms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and the pages."""
    head_dim = qkv.shape[2]
    k_pages, v_pages = empty_pages((qkv.shape[1] - num_heads) // 2, head_dim, qkv.dtype)
    weights = [normal(n * head_dim, dtype=qkv.dtype)[:head_dim] if norms else None for n in (2, 3)]
    tables = rope_tables(50, head_dim)
    q = rope_and_write(
        qkv, num_heads, *tables, positions, kv_loc, k_pages, v_pages, weights[0], weights[1], 1e-3
    )
    return q, k_pages, v_pages


def reference_rows(
    qkv: Tensor, num_heads: int, positions: Tensor, norms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated q and k, and v, as [T, heads, D] float64."""
    head_dim, num_kv_heads = qkv.shape[2], (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.double().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms:
        weights = [normal(n * head_dim, dtype=qkv.dtype)[:head_dim].double() for n in (2, 3)]
        q, k = reference.rms_norm(q, weights[0], 1e-3), reference.rms_norm(k, weights[1], 1e-3)
    cos, sin = (table.double() for table in rope_tables(50, head_dim))
    return (
        reference.apply_rope(q, cos, sin, positions),
        reference.apply_rope(k, cos, sin, positions),
        v,
    )


def rows_of(pages: Tensor, kv_loc: Tensor) -> Tensor:
    return pages[kv_loc // PAGE, :, kv_loc % PAGE]


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_it_agrees_with_float64(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, norms: bool
) -> None:
    qkv = normal(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    before = qkv.clone()
    positions = torch.tensor([0, 49, 7, 7, 1])
    kv_loc = torch.tensor([3, 0, NUM_PAGES * PAGE - 1, 9, 14])
    q, k_pages, v_pages = run(qkv, num_heads, positions, kv_loc, norms)
    wanted_q, wanted_k, wanted_v = reference_rows(qkv, num_heads, positions, norms)
    assert q.dtype == dtype and q.is_contiguous()
    for row in range(5):  # row by row: a wrong one must not hide behind the others
        at = kv_loc[row : row + 1]
        assert error(q[row], wanted_q[row]) < TOLERANCE[dtype]
        assert error(rows_of(k_pages, at)[0], wanted_k[row]) < TOLERANCE[dtype]
    assert torch.equal(rows_of(v_pages, kv_loc), wanted_v.to(dtype))
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_else_in_the_pages_changes(dtype: torch.dtype) -> None:
    qkv = normal(6, 15, 64, dtype=dtype)
    kv_loc = torch.tensor([-1, 5, -1, 8, 23, -1])
    _, *pools = run(qkv, 9, torch.arange(6), kv_loc, norms=False)
    untouched = torch.ones(NUM_PAGES * PAGE, dtype=torch.bool)
    untouched[kv_loc[kv_loc >= 0]] = False
    for pool in pools:
        positions = pool.transpose(1, 2).reshape(NUM_PAGES * PAGE, -1)
        assert positions[untouched].isnan().all()
        assert not positions[~untouched].isnan().any()


def test_a_row_that_writes_nothing_still_has_its_q() -> None:
    qkv, positions = normal(3, 15, 64), torch.tensor([4, 5, 6])
    q, k_pages, v_pages = run(qkv, 9, positions, torch.full((3,), -1), norms=False)
    assert torch.equal(q, run(qkv, 9, positions, torch.arange(3), norms=False)[0])
    assert k_pages.isnan().all() and v_pages.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_rounds_once(dtype: torch.dtype) -> None:
    qkv, positions = normal(6, 15, 64, dtype=dtype), torch.arange(6) * 9
    q, *_ = run(qkv, 9, positions, torch.arange(6), norms=True)
    expected = reference_rows(qkv, 9, positions, norms=True)[0].to(dtype)
    assert (q != expected).float().mean() < 2e-3


def test_v_is_copied_bit_for_bit_and_poison_stays_in_its_head() -> None:
    qkv = normal(2, 6, 64, dtype=torch.float16)
    qkv[0, 5, 3], qkv[1, 1, 0], qkv[1, 4, 2] = torch.inf, torch.nan, -0.0
    q, k_pages, v_pages = run(qkv, 2, torch.tensor([3, 4]), torch.tensor([1, 2]), norms=True)
    assert torch.equal(
        v_pages[0, :, 1:3].transpose(0, 1).view(torch.int16), qkv[:, 4:].view(torch.int16)
    )
    assert q[1, 1].isnan().all() and not q[1, 0].isnan().any() and not q[0].isnan().any()
    assert not k_pages[0, :, 1:3].isnan().any()


def test_rows_may_lie_apart() -> None:
    wide = torch.full((4, 20, 64), torch.nan)
    wide[:, :15] = normal(4, 15, 64)
    positions, kv_loc = torch.arange(4), torch.arange(4)
    apart, packed = wide[:, :15], wide[:, :15].contiguous()
    for x, y in zip(
        run(apart, 9, positions, kv_loc, norms=False),
        run(packed, 9, positions, kv_loc, norms=False),
        strict=True,
    ):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_is_rotated_as_in_any_company(dtype: torch.dtype) -> None:
    """The pages of the test hold 24 positions; the other rows write nothing."""
    qkv = normal(64, 5, 128, dtype=dtype)
    positions, kv_loc = torch.arange(64) % 50, torch.full((64,), -1)
    kv_loc[[0, 9, 33, 63]] = torch.tensor([5, 0, 17, 23])
    whole = run(qkv, 3, positions, kv_loc, norms=True)
    for row in (0, 9, 33, 63):
        one = slice(row, row + 1)
        q, k_pages, v_pages = run(qkv[one], 3, positions[one], kv_loc[one], norms=True)
        assert torch.equal(q, whole[0][one])
        assert torch.equal(rows_of(k_pages, kv_loc[one]), rows_of(whole[1], kv_loc[one]))
        assert torch.equal(rows_of(v_pages, kv_loc[one]), rows_of(whole[2], kv_loc[one]))
    for order in (torch.arange(17).flip(0), torch.tensor([9, 0])):
        q, k_pages, _ = run(qkv[order], 3, positions[order], kv_loc[order], norms=True)
        assert torch.equal(q, whole[0][order])
        assert torch.equal(rows_of(k_pages, kv_loc[[0, 9]]), rows_of(whole[1], kv_loc[[0, 9]]))


def test_no_rows_are_no_work() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert run(torch.empty(0, 15, 64), 9, nothing, nothing, norms=False)[0].shape == (0, 9, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 96), (16, 12), (96, 24)])
@pytest.mark.parametrize("norms", [False, True])
def test_a_part_of_a_head_may_rotate_alone(
    head_dim: int, rotary_dim: int, norms: bool, dtype: torch.dtype
) -> None:
    qkv, positions = normal(6, 7, head_dim, dtype=dtype), torch.arange(6) * 8
    pages = empty_pages(2, head_dim, dtype)
    weights = [normal(n * head_dim)[:head_dim] if norms else None for n in (2, 3)]
    tables, places = rope_tables(50, rotary_dim), torch.arange(6)
    q = rope_and_write(qkv, 3, *tables, positions, places, *pages, *weights, 1e-3)
    cos, sin = (table.double() for table in tables)
    k = rows_of(pages[0], places)
    for found, x, weight in zip(
        (q, k), qkv.double().split([3, 2, 2], dim=1), weights, strict=False
    ):
        normed = x if weight is None else reference.rms_norm(x, weight.double(), 1e-3)
        assert error(found, reference.apply_rope(normed, cos, sin, positions)) < TOLERANCE[dtype]
    assert torch.equal(rows_of(pages[1], places), qkv[:, 5:])
    if not norms:
        assert torch.equal(q[..., rotary_dim:], qkv[:, :3, rotary_dim:])
