"""The interpreter's own faults, planted: each is caught, or there is no sense in the other tests.

Also sees that a new Triton does not undo what bf16.py and bounds.py do.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.gpu import bf16
from tests.kernels.gpu.bounds import OutOfBounds, reachable


@triton.jit
def arithmetic(x_ptr, y_ptr, sum_ptr, product_ptr, third_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(sum_ptr + at, x + y)
    tl.store(product_ptr + at, x * y)
    tl.store(third_ptr + at, (x.to(tl.float32) * 0.3).to(x.dtype))


@triton.jit
def product(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    square = at[:, None] * BLOCK + at[None, :]
    tl.store(out_ptr + square, tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square)))


@triton.jit
def copy_block(source_ptr, target_ptr, count, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count if MASKED else at >= 0
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=mask, other=0), mask=mask)


@triton.jit
def read_by_address(table_ptr, target_ptr):
    address = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(target_ptr, tl.load(address))


def check_arithmetic(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    outs = [torch.empty_like(x) for _ in range(3)]
    arithmetic[(1,)](x, y, *outs, BLOCK=64)
    for out, wanted in zip(outs, (x + y, x * y, (x.float() * 0.3).to(dtype)), strict=True):
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_products_and_casts_are_those_of_torch(dtype: torch.dtype) -> None:
    check_arithmetic(dtype)


@pytest.mark.parametrize("operation", ["binary_op", "cast_impl"])
def test_the_interpreters_own_bf16_would_be_noticed(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16.Builder, operation, getattr(bf16, f"_{operation}"))
    with pytest.raises(AssertionError):
        check_arithmetic(torch.bfloat16)


def test_products_of_bf16_matrices_are_exact_to_float32() -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = torch.empty(16, 16)
    product[(1,)](a, b, out, BLOCK=16)
    assert torch.allclose(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_read_past_the_end_is_refused(is_masked: bool) -> None:
    source, target = torch.ones(20), torch.zeros(32)

    def run() -> None:
        copy_block[(2,)](source, target, 20, BLOCK=16, MASKED=is_masked)

    if is_masked:
        run()
        assert target.tolist() == [1.0] * 20 + [0.0] * 12
    else:
        with pytest.raises(OutOfBounds, match="12 of 16 lanes"):
            run()


def test_a_write_past_the_end_is_refused() -> None:
    with pytest.raises(OutOfBounds, match="12 of 16 lanes"):
        copy_block[(2,)](torch.ones(32), torch.zeros(20), 32, BLOCK=16, MASKED=False)


def test_a_tensor_reached_by_address_has_to_be_named() -> None:
    hidden, target = torch.full((1,), 3.0), torch.zeros(1)
    table = torch.tensor([hidden.data_ptr()])

    def run() -> None:
        read_by_address[(1,)](table, target)

    with reachable(hidden):
        run()
    assert target.item() == 3.0
    with pytest.raises(OutOfBounds):
        run()


@triton.jit
def weighted_sum(p_ptr, v_ptr, out_ptr, length, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.arange(0, BLOCK)
    p = tl.load(p_ptr + at)
    v = tl.load(v_ptr + at, mask=at < length, other=0.0) if MASKED else tl.load(v_ptr + at)
    tl.store(out_ptr, tl.sum(p * v))


def sum_of_page(length: int, is_masked: bool) -> Tensor:
    """Sum a page whose positions past `length` are NaN, with weights of zero there."""
    p, v, out = torch.zeros(16), torch.full((16,), torch.nan), torch.zeros(1)
    p[:length], v[:length] = 0.5, 2.0
    weighted_sum[(1,)](p, v, out, length, BLOCK=16, MASKED=is_masked)
    return out


def test_pages_poisoned_with_nan_show_a_missing_tail_mask() -> None:
    assert sum_of_page(5, is_masked=True).item() == 5.0
    assert sum_of_page(5, is_masked=False).isnan().all()
