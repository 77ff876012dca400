"""paged_prefill: right over poisoned pages, the same bits however prompts are cut."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.gpu.attention.paged_prefill import block_rows, cut_prefill, paged_prefill
from tests.kernels.gpu.pages import (
    DTYPES,
    TOLERANCE,
    Pool,
    error,
    make_pool,
    poisoned_rows,
    vast_zeros,
    with_sinks,
)

Run = tuple[int, int, int]  # sequence, first position, end


def prefill(pool: Pool, runs: Sequence[Run]) -> list[Tensor]:
    """Attend with runs of positions in one call; a row that belongs to nobody between any two."""
    first_rows, num_rows = [1], [end - first for _, first, end in runs]
    for count in num_rows:
        first_rows.append(first_rows[-1] + count + 1)
    q, out = poisoned_rows(first_rows.pop(), pool)
    for first_row, (sequence, first, end) in zip(first_rows, runs, strict=True):
        q[first_row : first_row + end - first] = pool.q[sequence][first:end]
    _, num_heads, head_dim = q.shape
    rows_each = block_rows(num_heads // pool.k_pages.shape[1], head_dim)
    blocks = cut_prefill(first_rows, num_rows, [end for *_, end in runs], rows_each)
    blocks.append((-5, 10**8, 0, 10**8))  # of no rows
    table = pool.page_table([sequence for sequence, *_ in runs])
    paged_prefill(
        q,
        pool.k_pages,
        pool.v_pages,
        torch.tensor(blocks, dtype=torch.int32),
        table,
        pool.scale,
        out,
        pool.window,
        pool.sinks,
    )
    done = [out[a : a + count] for a, count in zip(first_rows, num_rows, strict=True)]
    between = torch.ones(len(out), dtype=torch.bool)
    for a, count in zip(first_rows, num_rows, strict=True):
        between[a : a + count] = False
    assert out[between].isnan().all(), "rows that nobody asked for"
    return done


def check(pool: Pool, runs: Sequence[Run]) -> None:
    for run, actual in zip(runs, prefill(pool, runs), strict=True):
        expected = pool.expected(*run)
        assert error(actual, expected) < TOLERANCE[actual.dtype], run
        for row, wanted in zip(actual, expected, strict=True):
            assert error(row, wanted) < 3 * TOLERANCE[actual.dtype], run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("page_size", "heads", "head_dim"),
    [
        (16, (2, 2), 128),
        (32, (6, 2), 64),
        (64, (4, 1), 128),
        (128, (8, 1), 64),
        (16, (2, 2), 80),
        (32, (6, 2), 96),
        (16, (4, 1), 256),
        (128, (4, 1), 128),  # a head's page is more than one turn
    ],
)
def test_prompts_end_anywhere_in_a_page(
    page_size: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [1, page_size - 1, page_size, page_size + 1, 2 * page_size + 5]
    pool = make_pool(lengths, dtype, heads, head_dim, page_size)
    check(pool, [(i, 0, length) for i, length in enumerate(lengths)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_after_a_cached_prefix(dtype: torch.dtype) -> None:
    pool = make_pool([150, 96, 97, 70], dtype, (6, 2), 64, 32)
    check(pool, [(0, 64, 150), (1, 95, 96), (2, 96, 97), (3, 17, 70)])


@pytest.mark.parametrize(
    ("dtype", "sharpness"),
    [(torch.float32, 0.0), (torch.float32, 60.0), (torch.float16, 400.0), (torch.bfloat16, 400.0)],
)
def test_flat_and_sharp_attention(dtype: torch.dtype, sharpness: float) -> None:
    check(make_pool([100], dtype, (4, 1), 64, 32, sharpness), [(0, 0, 100)])


def test_scores_far_below_zero() -> None:
    """What a hidden position adds must not pass for the greatest."""
    pool = make_pool([100], torch.bfloat16, (3, 1), 64, 32)
    pool.k_pages.add_(3.0)
    for q in pool.q:
        q.sub_(12.0)
    check(pool, [(0, 0, 100)])


def test_a_group_of_more_heads_than_a_block_has_rows() -> None:
    check(make_pool([18], torch.float32, (130, 1), 64, 16), [(0, 0, 18)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(3, 1), (4, 1)])
@pytest.mark.usefixtures("dots_are_chains")
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(
    heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """What is not prefilled yet is NaN; the ends lie in pages, at their ends, and in blocks."""
    length = 135
    pool = make_pool([length], dtype, heads, 64, 32)
    (whole,) = prefill(pool, [(0, 0, length)])
    for cuts in ([1, 33, 64], [32, 128, 134], [43, 44, 100], [7]):
        ends = [*cuts, length]
        for first, end in zip([0, *ends], ends, strict=False):
            (part,) = prefill(pool.as_written_up_to(0, end), [(0, first, end)])
            assert torch.equal(part, whole[first:end]), (first, end)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    lengths = [70, 45, *[1 + i % 20 for i in range(63)]]
    pool = make_pool(lengths, dtype, (3, 1), 64, 32)
    runs = [(0, 3, 70), (1, 44, 45), *((i, 0, lengths[i]) for i in range(2, 65))]
    alone = [prefill(pool, [run])[0] for run in runs[:2]]
    for num_others in (2, 17):
        among = prefill(pool, runs[: num_others + 1])
        assert torch.equal(among[0], alone[0]) and torch.equal(among[1], alone[1])
    among = prefill(pool, runs[::-1])
    assert torch.equal(among[-1], alone[0]) and torch.equal(among[-2], alone[1])


@pytest.mark.parametrize("window", [1, 31, 32, 50, 64, 200])
@pytest.mark.usefixtures("dots_are_chains")
def test_rows_see_no_more_than_their_windows_however_prompts_are_cut(window: int) -> None:
    length = 135
    for dtype in DTYPES:
        pool = replace(make_pool([length], dtype, (3, 1), 32, 32), window=window)
        check(pool, [(0, 0, length)])
        (whole,) = prefill(pool, [(0, 0, length)])
        for first, end in ((0, 1), (1, 33), (43, 100), (100, 135), (134, 135)):
            (part,) = prefill(pool.as_written_up_to(0, end), [(0, first, end)])
            assert torch.equal(part, whole[first:end]), (first, end)


@pytest.mark.parametrize(
    ("window", "louder"), [(0, 0.0), (0, 4.0), (0, -30.0), (31, 0.0), (64, 0.0)]
)
@pytest.mark.usefixtures("dots_are_chains")
def test_sinks_join_the_softmax_however_prompts_are_cut(window: int, louder: float) -> None:
    length = 135
    for dtype in DTYPES:
        pool = with_sinks(make_pool([length], dtype, (6, 2), 32, 32), window, louder)
        check(pool, [(0, 0, length)])
        (whole,) = prefill(pool, [(0, 0, length)])
        for first, end in ((0, 1), (1, 33), (43, 100), (134, 135)):
            (part,) = prefill(pool.as_written_up_to(0, end), [(0, first, end)])
            assert torch.equal(part, whole[first:end]), (first, end)


def test_blocks_that_read_most_come_first() -> None:
    blocks = cut_prefill([0, 100, 107], [100, 7, 0], [100, 500, 30], 42)
    assert blocks == [(1, 100, 7, 493), (0, 84, 16, 84), (0, 42, 42, 42), (0, 0, 42, 0)]


def test_equal_blocks_come_in_order_of_their_sequences() -> None:
    blocks = cut_prefill([10, 2], [4, 4], [9, 9], 2)
    assert blocks == [(0, 12, 2, 7), (1, 4, 2, 7), (0, 10, 2, 5), (1, 2, 2, 5)]


@pytest.mark.parametrize(("group", "rows"), [(1, 128), (3, 42), (4, 32), (8, 16), (200, 1)])
def test_a_block_has_as_many_rows_as_its_tile_holds(group: int, rows: int) -> None:
    assert block_rows(group, 64) == block_rows(group, 128) == rows


def test_nothing_is_prefilled() -> None:
    pool = make_pool([5], torch.float32)
    assert prefill(pool, []) == []
    blocks = torch.zeros(0, 4, dtype=torch.int32)
    q, out = poisoned_rows(1, pool)
    paged_prefill(q, pool.k_pages, pool.v_pages, blocks, pool.page_table([0]), 1.0, out)
    assert out.isnan().all()


def test_heads_may_lie_apart() -> None:
    pool = make_pool([40], torch.float32)
    wide, out = torch.full((40, 6, 96), torch.nan), torch.full((40, 6, 64), torch.nan)
    q = wide[:, :, :64]
    q[:] = pool.q[0]
    blocks = torch.tensor(cut_prefill([0], [40], [40], 42), dtype=torch.int32)
    table = pool.page_table([0])
    paged_prefill(q, pool.k_pages, pool.v_pages, blocks, table, pool.scale, out)
    assert error(out, pool.expected(0, 0, 40)) < 1e-5


def test_offsets_pass_two_to_the_31() -> None:
    """Of pages and of rows of q, in both loops."""
    memory = vast_zeros()
    pages = memory[: memory.numel() // 1024 * 1024].view(-1, 1, 16, 64)
    small = make_pool([20], torch.float16, (1, 1), 64, 16)
    table = torch.tensor([[len(pages) - 1, len(pages) - 2]], dtype=torch.int32)
    for page, place in zip(small.tables[0], table[0].tolist(), strict=True):
        pages[place] = small.k_pages[page]
    q = memory.as_strided((3, 1, 64), (1 << 30, 64, 1))
    q[2] = small.q[0][-1]
    out = torch.empty(3, 1, 64, dtype=torch.float16)
    blocks = torch.tensor([[0, 2, 1, 19]], dtype=torch.int32)
    paged_prefill(q, pages, pages, blocks, table, small.scale, out)
    same = Pool(small.k_pages, small.k_pages, small.q, small.tables)
    assert error(out[2:], same.expected(0, 19, 20)) < TOLERANCE[torch.float16]
