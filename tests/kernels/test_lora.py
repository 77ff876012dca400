"""kernels.lora: each adapter on its own rows, and no row changed by another."""

import pytest
import torch
from torch import Tensor

from kernels import lora, reference
from kernels.lora import LoraSegment, embedding_lora_apply, lora_apply
from kernels.native.library import native_library

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
LORA_RANKS = [1, 2, 4, 8, 12, 16, 64]


@pytest.fixture(params=["native", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in C and in torch."""
    if request.param == "torch":
        monkeypatch.setattr(lora, "native_library", lambda: None)
    elif native_library() is None:
        pytest.skip("this machine cannot have the native library")


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def adapter(lora_rank: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A and B; B is laid out as a bank keeps it where lora_rank is even."""
    generator = torch.Generator().manual_seed(lora_rank * 1000 + n + k)
    a = torch.randn(lora_rank, k, generator=generator) / k**0.5
    b = torch.randn(n, lora_rank, generator=generator).to(dtype)
    return a.to(dtype), b if lora_rank % 2 else b.T.contiguous().T


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_adapters_in_one_batch_agree_with_float64(dtype: torch.dtype) -> None:
    k, n = 576, 192
    x, y = rows(60, k, dtype), rows(60, n, dtype)
    expected = y.double()
    segments = []
    for start, stop, lora_rank in [(0, 1, 1), (1, 18, 12), (20, 22, 64), (22, 23, 8), (40, 60, 16)]:
        a, b = adapter(lora_rank, n, k, dtype)
        segments.append(LoraSegment(start, stop, a, b))
        expected[start:stop] += reference.lora(x[start:stop].double(), a.double(), b.double())
    before = y.clone()
    lora_apply(y, x, segments)
    assert error(y, expected) < TOLERANCE[dtype]
    for untouched in (slice(18, 20), slice(23, 40)):
        assert torch.equal(y[untouched], before[untouched])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lora_rank", LORA_RANKS)
@pytest.mark.parametrize(("n", "k"), [(1, 64), (64, 1), (192, 576), (576, 1537), (3, 8)])
def test_a_row_has_the_same_bits_alone_and_in_any_segment(
    n: int, k: int, lora_rank: int, dtype: torch.dtype
) -> None:
    a, b = adapter(lora_rank, n, k, dtype)
    other_a, other_b = adapter(5, n, k, dtype)
    x, y = rows(300, k, dtype), rows(300, n, dtype)
    whole = y.clone()
    lora_apply(whole, x, [LoraSegment(0, 300, a, b)])
    for start, stop in [(0, 1), (299, 300), (7, 9), (3, 6), (0, 4), (290, 300), (11, 28), (0, 299)]:
        alone = y[start:stop].clone()
        lora_apply(alone, x[start:stop], [LoraSegment(0, stop - start, a, b)])
        assert torch.equal(alone, whole[start:stop])
        in_company = y.clone()
        segments = [LoraSegment(start, stop, a, b)]
        if start > 0:
            segments.insert(0, LoraSegment(0, start, other_a, other_b))
        lora_apply(in_company, x, segments)
        assert torch.equal(in_company[start:stop], whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_neighbour_full_of_nan_changes_nothing(dtype: torch.dtype) -> None:
    a, b = adapter(8, 64, 64, dtype)
    x, y = rows(5, 64, dtype), rows(5, 64, dtype)
    alone = y[2:3].clone()
    lora_apply(alone, x[2:3], [LoraSegment(0, 1, a, b)])
    x[:2], x[3:] = torch.nan, torch.nan
    before = y.clone()
    lora_apply(y, x, [LoraSegment(2, 3, a, b)])
    assert torch.equal(y[2:3], alone)
    assert torch.equal(y[:2], before[:2])
    assert torch.equal(y[3:], before[3:])


def test_no_segments_touch_nothing() -> None:
    y = torch.full((3, 4), torch.nan)
    lora_apply(y, torch.randn(3, 5), [])
    assert y.isnan().all()


def test_the_output_may_be_a_slice_of_a_fused_projection() -> None:
    a, b = adapter(4, 16, 32, torch.float32)
    x, fused = rows(6, 32, torch.float32), torch.zeros(6, 48)
    lora_apply(fused[:, 16:32], x, [LoraSegment(1, 5, a, b)])
    assert error(fused[1:5, 16:32], reference.lora(x[1:5].double(), a.double(), b.double())) < 1e-5
    assert fused[:, :16].count_nonzero() == fused[:, 32:].count_nonzero() == 0


def test_a_float32_adapter_and_its_bfloat16_form_give_the_same_bits() -> None:
    a, b = adapter(8, 64, 96, torch.bfloat16)
    x = rows(6, 96, torch.bfloat16)
    narrow, wide = (torch.zeros(6, 64, dtype=torch.bfloat16) for _ in range(2))
    lora_apply(narrow, x, [LoraSegment(0, 6, a, b)])
    lora_apply(wide, x, [LoraSegment(0, 6, a.float(), b.float())])
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(576, 192, 192), (33, 5, 1)])
def test_naming_the_blocks_of_b_changes_nothing_but_rounding(
    widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    lora_rank, k, n = 12, 96, sum(widths)
    a = adapter(lora_rank * len(widths), 1, k, torch.float32)[0]
    b = torch.zeros(n, lora_rank * len(widths))
    blocks, row = [], 0
    for i, width in enumerate(widths):
        first, last = i * lora_rank, (i + 1) * lora_rank
        b[row : row + width, first:last] = adapter(lora_rank, width, k, torch.float32)[1]
        blocks.append((first, last, row, row + width))
        row += width
    x, y = rows(40, k, dtype), rows(40, n, dtype)
    expected = y[2:].double() + reference.lora(x[2:].double(), a.double(), b.double())
    for layout in (b, b.T.contiguous().T):
        actual = y.clone()
        lora_apply(actual, x, [LoraSegment(2, 40, a, layout, torch.tensor(blocks))])
        assert error(actual[2:], expected) < TOLERANCE[dtype]
        assert torch.equal(actual[:2], y[:2])
        alone = y[5:6].clone()
        lora_apply(alone, x[5:6], [LoraSegment(0, 1, a, layout, torch.tensor(blocks))])
        assert torch.equal(alone, actual[5:6])


def gain_and_shift(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.rand(n, generator=generator) + 0.5, torch.randn(n, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gain_multiplies_its_own_rows_before_the_delta(dtype: torch.dtype) -> None:
    k, n = 96, 160
    x, y = rows(30, k, dtype), rows(30, n, dtype)
    a, b = adapter(8, n, k, dtype)
    gain, shift = gain_and_shift(n)
    segments = [
        LoraSegment(0, 4, a, b),
        LoraSegment(5, 17, a, b, None, gain, shift),
        LoraSegment(17, 18, a, b, None, gain),
        LoraSegment(20, 30, a, b),
    ]
    before, plain = y.clone(), y.clone()
    lora_apply(y, x, segments)
    lora_apply(plain, x, [LoraSegment(0, 30, a, b)])
    delta = reference.lora(x.double(), a.double(), b.double())
    expected = before.double() * gain + delta
    assert error(y[17:18], expected[17:18]) < TOLERANCE[dtype]
    assert error(y[5:17], expected[5:17] + shift) < TOLERANCE[dtype]
    for rest in (slice(0, 4), slice(20, 30)):
        assert torch.equal(y[rest], plain[rest])
    for untouched in (slice(4, 5), slice(18, 20)):
        assert torch.equal(y[untouched], before[untouched])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 64), (192, 576), (33, 5)])
def test_a_row_with_a_gain_has_the_same_bits_alone(n: int, k: int, dtype: torch.dtype) -> None:
    a, b = adapter(4, n, k, dtype)
    gain, shift = gain_and_shift(n)
    x, y = rows(300, k, dtype), rows(300, n, dtype)
    whole = y.clone()
    lora_apply(whole, x, [LoraSegment(0, 300, a, b, None, gain, shift)])
    for start, stop in [(0, 1), (299, 300), (7, 9), (3, 8), (11, 100)]:
        alone = y[start:stop].clone()
        segment = LoraSegment(0, stop - start, a, b, None, gain, shift)
        lora_apply(alone, x[start:stop], [segment])
        assert torch.equal(alone, whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lora_rank", [1, 3, 16])
@pytest.mark.parametrize("hidden", [8, 576, 33])
def test_the_lora_of_an_embedding_takes_a_row_of_a_for_each_token(
    hidden: int, lora_rank: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(hidden)
    a = torch.randn(50, lora_rank, generator=generator)
    _, b = adapter(lora_rank, hidden, 8, torch.float32)
    gain, _ = gain_and_shift(hidden)
    token_ids = torch.randint(0, 50, (40,), generator=generator)
    x = rows(40, hidden, dtype)
    for some_gain in (None, gain):
        whole = x.clone()
        embedding_lora_apply(whole, token_ids, a, b, some_gain)
        expected = x.double() * (1 if some_gain is None else some_gain)
        expected = expected + a[token_ids].double() @ b.double().T
        assert error(whole, expected) < TOLERANCE[dtype]
        for start, stop in [(0, 1), (39, 40), (3, 6), (10, 30)]:
            alone = x[start:stop].clone()
            embedding_lora_apply(alone, token_ids[start:stop], a, b, some_gain)
            assert torch.equal(alone, whole[start:stop])
