"""paged_decode: right over poisoned pages, and the same bits in any company."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.gpu.attention.paged_decode import most_splits, num_splits, paged_decode
from tests.kernels.gpu.pages import (
    DTYPES,
    GARBAGE,
    TOLERANCE,
    Pool,
    error,
    make_pool,
    poisoned_rows,
    vast_zeros,
    with_sinks,
)


@pytest.fixture(autouse=True)
def scratch_is_poisoned() -> Iterator[None]:
    """Make torch fill what it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def decode(pool: Pool, sequences: Sequence[int], max_splits: int | None = None) -> list[Tensor]:
    """Decode the last position of each sequence in one call; the rows lie apart, last first."""
    q, out = poisoned_rows(2 * len(sequences) + 1, pool)
    rows = [2 * (len(sequences) - i) - 1 for i in range(len(sequences))]
    lengths = pool.lengths(sequences)
    for index, sequence in enumerate(sequences):
        if lengths[index] > 0:
            q[rows[index]] = pool.q[sequence][-1]
        else:
            rows[index] = GARBAGE
    paged_decode(
        q,
        pool.k_pages,
        pool.v_pages,
        torch.tensor(rows, dtype=torch.int32),
        pool.page_table(sequences),
        torch.tensor(lengths, dtype=torch.int32),
        pool.scale,
        out,
        max(map(most_splits, lengths)) if max_splits is None else max_splits,
        pool.window,
        pool.sinks,
    )
    written = [row for row in rows if row != GARBAGE]
    others = [row for row in range(len(out)) if row not in written]
    assert out[others].isnan().all(), "rows that nobody asked for"
    return [out[row] for row in written]


def check(pool: Pool, max_splits: int | None = None) -> None:
    sequences = range(len(pool.q))
    lengths = pool.lengths(sequences)
    filled = [i for i in sequences if lengths[i] > 0]
    actual = decode(pool, sequences, max_splits)
    for i, row in zip(filled, actual, strict=True):
        expected = pool.expected(i, lengths[i] - 1, lengths[i])[0]
        assert error(row, expected) < TOLERANCE[row.dtype], f"{lengths[i]} positions"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("page_size", "heads", "head_dim"),
    [
        (16, (2, 2), 128),
        (32, (6, 2), 64),
        (64, (8, 2), 128),
        (128, (8, 1), 64),
        (16, (2, 2), 80),
        (32, (6, 2), 96),
        (16, (4, 1), 256),
        (128, (20, 1), 128),  # more heads than a tensor core's rows, more than a turn's positions
    ],
)
def test_a_context_ends_anywhere_in_a_page(
    page_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [1, page_size - 1, 0, page_size, page_size + 1, 2 * page_size + 5]
    check(make_pool(lengths, dtype, heads, head_dim, page_size))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_context_ends_anywhere_in_a_split(dtype: torch.dtype) -> None:
    check(make_pool([511, 512, 513, 1023, 1024, 1025], dtype, (3, 1), 64, 128))


def test_splits_of_several_kv_heads_are_merged_apart() -> None:
    check(make_pool([0, 513, 1, 1100], torch.float32, (6, 2), 64, 128))


def test_more_splits_than_are_merged_at_once() -> None:
    check(make_pool([16 * 512 + 1], torch.float32, (1, 1), 64, 128))


@pytest.mark.parametrize("length", [32768, 32769])
def test_a_very_long_context_has_longer_splits(length: int) -> None:
    check(make_pool([length], torch.float32, (2, 1), 64, 128))


@pytest.mark.parametrize(
    ("length", "splits"),
    [
        *((0, 0), (1, 1), (128, 1), (129, 2), (1024, 8), (1025, 5), (2048, 8), (2049, 6)),
        *((4096, 8), (4097, 9), (32768, 64), (32769, 33), (65536, 64), (65537, 43)),
    ],
)
def test_splits_are_counted_by_length_alone(length: int, splits: int) -> None:
    assert num_splits(length) == splits


def test_no_shorter_context_has_more_splits_than_there_is_room_for() -> None:
    most = 0
    for length in range(70_000):
        most = max(most, num_splits(length))
        assert most_splits(length) == most


@pytest.mark.parametrize(
    ("dtype", "sharpness"),
    [(torch.float32, 0.0), (torch.float32, 60.0), (torch.float16, 400.0), (torch.bfloat16, 400.0)],
)
def test_flat_and_sharp_attention(dtype: torch.dtype, sharpness: float) -> None:
    check(make_pool([100, 700], dtype, (3, 1), 64, 32, sharpness))


def test_scores_far_below_zero() -> None:
    """What a hidden position, or a split that is not there, adds must not pass for the greatest."""
    pool = make_pool([40, 600], torch.bfloat16, (3, 1), 64, 128)
    pool.k_pages.add_(3.0)
    for q in pool.q:
        q.sub_(12.0)
    check(pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    lengths = [515, 40, 0, 1, 15, 16, *[1 + i % 33 for i in range(59)]]
    pool = make_pool(lengths, dtype, (3, 1), 64, 32)
    alone = [decode(pool, [i])[0] for i in (0, 1)]
    for num_others in (2, 17):
        among = decode(pool, range(num_others + 1))
        assert torch.equal(among[0], alone[0]) and torch.equal(among[1], alone[1])
    among = decode(pool, range(64, -1, -1))
    assert torch.equal(among[-1], alone[0]) and torch.equal(among[-2], alone[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_room_for_more_splits_changes_no_bit(dtype: torch.dtype) -> None:
    """With `max_splits` 1 nothing is merged at all."""
    pool = make_pool([128, 0, 77, 1], dtype, (3, 1), 64, 64)
    once = decode(pool, range(4), 1)
    for max_splits in (2, 7, 64):
        more = decode(pool, range(4), max_splits)
        assert all(torch.equal(a, b) for a, b in zip(once, more, strict=True))
    split = make_pool([600, 33], dtype, (3, 1), 64, 64)
    for a, b in zip(decode(split, range(2), 5), decode(split, range(2), 64), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("window", [1, 15, 16, 100, 513, 2000])
def test_rows_see_no_more_than_their_windows(window: int) -> None:
    """Also where a window begins in a split, at its end, or is larger than some contexts."""
    for dtype in DTYPES:
        lengths = [1, 15, 16, 17, 100, 512, 513, 600, 1025, 1100]
        check(replace(make_pool(lengths, dtype, (3, 1), 32, 32), window=window))


@pytest.mark.parametrize(("window", "louder"), [(0, 0.0), (0, 4.0), (0, -30.0), (100, 0.0)])
def test_sinks_join_the_softmax_once_whatever_splits_there_are(window: int, louder: float) -> None:
    for dtype in DTYPES:
        lengths = [1, 15, 17, 512, 513, 600, 1025, 1100]
        check(with_sinks(make_pool(lengths, dtype, (6, 2), 32, 32), window, louder))


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_and_room_for_splits_change_no_bit_beside_sinks(dtype: torch.dtype) -> None:
    pool = with_sinks(make_pool([600, 40, 0, 1], dtype, (3, 1), 64, 32))
    alone = [decode(pool, [i])[0] for i in (0, 1)]
    for max_splits in (5, 9):
        among = decode(pool, range(4), max_splits)
        assert torch.equal(among[0], alone[0]) and torch.equal(among[1], alone[1])


def test_other_pages_of_the_same_content_change_no_bit() -> None:
    pool = make_pool([530, 20], torch.bfloat16, (3, 1), 64, 32)
    moved = torch.randperm(len(pool.k_pages), generator=torch.Generator().manual_seed(1))
    places = moved.argsort()
    tables = tuple([int(places[page]) for page in table] for table in pool.tables)
    other = Pool(pool.k_pages[moved], pool.v_pages[moved], pool.q, tables)
    for a, b in zip(decode(pool, range(2)), decode(other, range(2)), strict=True):
        assert torch.equal(a, b)


def test_nobody_is_decoded() -> None:
    pool = make_pool([0, 0], torch.float32)
    assert decode(pool, [0, 1]) == [] and decode(pool, [0, 1], 3) == []
    assert decode(pool, [], 1) == []


def test_heads_may_lie_apart() -> None:
    pool = make_pool([40], torch.float32)
    wide, out = torch.full((1, 6, 96), torch.nan), torch.full((1, 6, 64), torch.nan)
    q = wide[:, :, :64]
    q[0] = pool.q[0][-1]
    zero, length = torch.zeros(1, dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    table = pool.page_table([0])
    paged_decode(q, pool.k_pages, pool.v_pages, zero, table, length, pool.scale, out, 1)
    assert error(out, pool.expected(0, 39, 40)) < 1e-5


def test_offsets_pass_two_to_the_31() -> None:
    """Of pages, of rows of q and of rows of out."""
    torch.use_deterministic_algorithms(False)
    memory = vast_zeros()
    pages = memory[: memory.numel() // 1024 * 1024].view(-1, 1, 16, 64)
    small = make_pool([20], torch.float16, (1, 1), 64, 16)
    table = torch.tensor([[len(pages) - 1, len(pages) - 2]], dtype=torch.int32)
    for page, place in zip(small.tables[0], table[0].tolist(), strict=True):
        pages[place] = small.k_pages[page]
    q = memory.as_strided((3, 1, 64), (1 << 30, 64, 1))
    q[2] = small.q[0][-1]
    row, length = torch.tensor([2], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    out = torch.empty(3, 1, 64, dtype=torch.float16)
    paged_decode(q, pages, pages, row, table, length, small.scale, out, 1)
    same = Pool(small.k_pages, small.k_pages, small.q, small.tables)
    assert error(out[2:], same.expected(0, 19, 20)) < TOLERANCE[torch.float16]
