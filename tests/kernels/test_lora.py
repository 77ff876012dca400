"""kernels.lora: each adapter on its own rows, and no row changed by another."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.lora import (
    BLOCK_ALIGNMENT,
    LoraSegment,
    embedding_lora_apply,
    join_blocks,
    lora_apply,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
LORA_RANKS = [1, 2, 4, 8, 12, 16, 64]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def adapter(lora_rank: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A and B."""
    generator = torch.Generator().manual_seed(lora_rank * 1000 + n + k)
    a = torch.randn(lora_rank, k, generator=generator) / k**0.5
    return a.to(dtype), torch.randn(n, lora_rank, generator=generator).to(dtype)


def segment(
    start: int,
    stop: int,
    a: Tensor,
    b: Tensor,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
) -> LoraSegment:
    """Return the segment of a B that is one block."""
    return LoraSegment(start, stop, a, *join_blocks([(0, b)]), gain, shift)


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
        segments.append(segment(start, stop, a, b))
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
    lora_apply(whole, x, [segment(0, 300, a, b)])
    for start, stop in [(0, 1), (299, 300), (7, 9), (3, 6), (0, 4), (290, 300), (11, 28), (0, 299)]:
        alone = y[start:stop].clone()
        lora_apply(alone, x[start:stop], [segment(0, stop - start, a, b)])
        assert torch.equal(alone, whole[start:stop])
        in_company = y.clone()
        segments = [segment(start, stop, a, b)]
        if start > 0:
            segments.insert(0, segment(0, start, other_a, other_b))
        lora_apply(in_company, x, segments)
        assert torch.equal(in_company[start:stop], whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_neighbour_full_of_nan_changes_nothing(dtype: torch.dtype) -> None:
    a, b = adapter(8, 64, 64, dtype)
    x, y = rows(5, 64, dtype), rows(5, 64, dtype)
    alone = y[2:3].clone()
    lora_apply(alone, x[2:3], [segment(0, 1, a, b)])
    x[:2], x[3:] = torch.nan, torch.nan
    before = y.clone()
    lora_apply(y, x, [segment(2, 3, a, b)])
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
    lora_apply(fused[:, 16:32], x, [segment(1, 5, a, b)])
    assert error(fused[1:5, 16:32], reference.lora(x[1:5].double(), a.double(), b.double())) < 1e-5
    assert fused[:, :16].count_nonzero() == fused[:, 32:].count_nonzero() == 0


def test_a_float32_adapter_and_its_bfloat16_form_give_the_same_bits() -> None:
    a, b = adapter(8, 64, 96, torch.bfloat16)
    x = rows(6, 96, torch.bfloat16)
    narrow, wide = (torch.zeros(6, 64, dtype=torch.bfloat16) for _ in range(2))
    lora_apply(narrow, x, [segment(0, 6, a, b)])
    lora_apply(wide, x, [segment(0, 6, a.float(), b.float())])
    assert torch.equal(narrow, wide)


WIDTHS = [(576, 192, 192), (33, 5, 1), (40, 20)]


def joined(
    widths: tuple[int, ...], lora_ranks: tuple[int, ...], k: int, dtype: torch.dtype
) -> tuple[Tensor, list[tuple[int, Tensor]], Tensor]:
    """Return A, B in blocks, one for each width whose lora_rank is not 0, and B whole."""
    a = adapter(sum(lora_ranks), 1, k, dtype)[0]
    whole = torch.zeros(sum(widths), sum(lora_ranks), dtype=dtype)
    blocks, output, rank = [], 0, 0
    for width, lora_rank in zip(widths, lora_ranks, strict=False):
        if lora_rank > 0:
            b = adapter(lora_rank, width, k, dtype)[1]
            blocks.append((output, b))
            whole[output : output + width, rank : rank + lora_rank] = b
        output, rank = output + width, rank + lora_rank
    return a, blocks, whole


@pytest.mark.parametrize("lora_ranks", [(12, 12, 12), (3, 0, 7), (1, 40, 2)])
@pytest.mark.parametrize("widths", WIDTHS)
def test_blocks_lie_one_after_the_other_each_on_its_own_cache_line(
    widths: tuple[int, ...], lora_ranks: tuple[int, ...]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        _, blocks, _ = joined(widths, lora_ranks[: len(widths)], 8, dtype)
        data, index = join_blocks(blocks)
        assert data.dtype == dtype
        rank = end = 0
        for (output, b), row in zip(blocks, index.tolist(), strict=True):
            first = row[4]
            assert first * dtype.itemsize % BLOCK_ALIGNMENT == 0
            assert 0 <= (first - end) * dtype.itemsize < BLOCK_ALIGNMENT
            assert row[:4] == [rank, rank + b.shape[1], output, output + b.shape[0]]
            rank, end = row[1], first + b.numel()
            assert torch.equal(data[first:end].view(b.T.shape), b.T)
        assert data.numel() == end  # nothing of B that is zero takes room


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lora_ranks", [(12, 12, 12), (3, 0, 7), (1, 40, 2)])
@pytest.mark.parametrize("widths", WIDTHS)
def test_blocks_of_several_modules_compute_what_b_with_its_zeros_does(
    widths: tuple[int, ...], lora_ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    k, n = 96, sum(widths)
    a, blocks, whole = joined(widths, lora_ranks[: len(widths)], k, torch.float32)
    b, index = join_blocks(blocks)
    x, y = rows(40, k, dtype), rows(40, n, dtype)
    expected = y[2:].double() + reference.lora(x[2:].double(), a.double(), whole.double())
    actual = y.clone()
    lora_apply(actual, x, [LoraSegment(2, 40, a, b, index)])
    assert error(actual[2:], expected) < TOLERANCE[dtype]
    assert torch.equal(actual[:2], y[:2])
    untouched = whole.abs().sum(1) == 0
    assert torch.equal(actual[:, untouched], y[:, untouched])
    for start, stop in [(5, 6), (2, 4), (30, 39), (39, 40)]:
        alone = y[start:stop].clone()
        lora_apply(alone, x[start:stop], [LoraSegment(0, stop - start, a, b, index)])
        assert torch.equal(alone, actual[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_module_beside_others_has_the_bits_that_it_has_alone(dtype: torch.dtype) -> None:
    widths, lora_ranks, k = (576, 192, 192), (8, 3, 16), 96
    a, blocks, _ = joined(widths, lora_ranks, k, torch.float32)
    x, y = rows(9, k, dtype), rows(9, sum(widths), dtype)
    together = y.clone()
    lora_apply(together, x, [LoraSegment(0, 9, a, *join_blocks(blocks))])
    rank = 0
    for output, b in blocks:
        outputs = slice(output, output + b.shape[0])
        alone = y[:, outputs].clone()
        lora_apply(alone, x, [segment(0, 9, a[rank : rank + b.shape[1]], b)])
        assert torch.equal(together[:, outputs], alone)
        rank += b.shape[1]


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
        segment(0, 4, a, b),
        segment(5, 17, a, b, gain, shift),
        segment(17, 18, a, b, gain),
        segment(20, 30, a, b),
    ]
    before, plain = y.clone(), y.clone()
    lora_apply(y, x, segments)
    lora_apply(plain, x, [segment(0, 30, a, b)])
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
    lora_apply(whole, x, [segment(0, 300, a, b, gain, shift)])
    for start, stop in [(0, 1), (299, 300), (7, 9), (3, 8), (11, 100)]:
        alone = y[start:stop].clone()
        lora_apply(alone, x[start:stop], [segment(0, stop - start, a, b, gain, shift)])
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
