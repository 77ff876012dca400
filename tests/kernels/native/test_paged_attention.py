"""kernels.native paged_attention.c: right over poisoned pages, and the same bits in any company."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.attention_batch import AttentionBatch
from kernels.native.library import Library
from kernels.native.ops import AttentionOp
from kernels.native.program import Program, Step, ThreadPool
from tests.random_cases import num_cases

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
Piece = tuple[int, int, int]  # sequence, first position, last position + 1


@pytest.fixture(scope="module")
def library(library_of_products: Library) -> Library:
    return library_of_products


@pytest.fixture(scope="module")
def thread_pools(library: Library) -> list[ThreadPool]:
    return [ThreadPool(library, num_threads) for num_threads in (1, 2, 3)]


@pytest.fixture
def thread_pool(thread_pools: list[ThreadPool]) -> ThreadPool:
    return thread_pools[0]


def attend(
    thread_pool: ThreadPool,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    scale: float | None = None,
) -> Tensor:
    """Run the op for one step into an output that was NaN."""
    num_rows, num_heads, head_dim = q.shape
    out = torch.full((num_rows, num_heads, head_dim), torch.nan, dtype=q.dtype)
    op = AttentionOp(q.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), out.data_ptr())
    op.q_stride, op.num_heads, op.num_kv_heads = q.stride(0), num_heads, k_pages.shape[1]
    op.head_dim, op.page_size = head_dim, k_pages.shape[2]
    op.is_bf16 = q.dtype == torch.bfloat16
    op.scale = head_dim**-0.5 if scale is None else scale
    program = Program()
    program.add(thread_pool.library.op("paged_attention"), op, (q, k_pages, v_pages, out))
    thread_pool.run(program, Step(num_rows, batch))
    return out


@dataclass(frozen=True)
class Pool:
    """Sequences of random K and V scattered over pages whose every other value is NaN."""

    k_pages: Tensor
    v_pages: Tensor
    q: list[Tensor]  # of each sequence, for every position
    tables: list[list[int]]

    def attend(self, thread_pool: ThreadPool, pieces: Sequence[Piece]) -> list[Tensor]:
        """Attend with runs of positions in one step."""
        starts = [0]
        for _, first, last in pieces:
            starts.append(starts[-1] + last - first)
        lengths, tables = [last for _, _, last in pieces], [self.tables[i] for i, _, _ in pieces]
        batch = AttentionBatch.build(starts, lengths, tables, self.k_pages.shape[2])
        q = torch.cat([self.q[i][first:last] for i, first, last in pieces])
        out = attend(thread_pool, q, self.k_pages, self.v_pages, batch)
        return [out[a:b] for a, b in zip(starts, starts[1:], strict=False)]

    def expected(self, piece: Piece) -> Tensor:
        """Return what the float64 reference makes of a run of positions."""
        sequence, first, last = piece
        k, v = (
            reference.read_pages(pages, self.tables[sequence], last).double()
            for pages in (self.k_pages, self.v_pages)
        )
        q = self.q[sequence][first:last].double()
        return reference.attention(q, k, v, q.shape[-1] ** -0.5)


def make_pool(
    lengths: Sequence[int],
    dtype: torch.dtype,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    page_size: int = 64,
) -> Pool:
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // page_size) for length in lengths]
    shape = (sum(counts) + 3, heads[1], page_size, head_dim)
    k_pages, v_pages = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    free = torch.randperm(len(k_pages), generator=generator).tolist()
    tables, queries = [], []
    for length, count in zip(lengths, counts, strict=True):
        table, free = free[:count], free[count:]
        for pages in (k_pages, v_pages):
            for position in range(length):
                row = torch.randn(heads[1], head_dim, generator=generator)
                pages[table[position // page_size], :, position % page_size] = row.to(dtype)
        tables.append(table)
        queries.append(torch.randn(length, heads[0], head_dim, generator=generator).to(dtype))
    return Pool(k_pages, v_pages, queries, tables)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"),
    [
        ((9, 3), 64, 64),
        ((9, 3), 64, 16),
        ((3, 3), 128, 32),
        ((16, 1), 64, 48),
        ((14, 2), 80, 64),
        ((10, 2), 96, 1),
        ((8, 2), 256, 128),
        ((5, 1), 72, 7),
        ((2, 2), 2, 64),
        ((12, 6), 30, 24),
    ],
)
def test_decodes_and_prefills_agree_with_float64(
    thread_pool: ThreadPool,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    lengths = [1, 2, 16, 63, 64, 65, page_size, page_size + 1, 127, 128, 129, 300]
    pool = make_pool(lengths, dtype, heads, head_dim, page_size)
    decodes = [(i, length - 1, length) for i, length in enumerate(lengths)]
    prefills = [(i, 0, length) for i, length in enumerate(lengths)]
    for pieces in (decodes, prefills, decodes[:6] + prefills[6:], [(11, 150, 290)]):
        for piece, actual in zip(pieces, pool.attend(thread_pool, pieces), strict=True):
            assert error(actual, pool.expected(piece)) < TOLERANCE[dtype], piece


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"),
    [((9, 3), 64, 64), ((2, 2), 80, 16), ((8, 1), 32, 256), ((7, 1), 96, 48)],
)
def test_chunking_and_decoding_give_the_bits_of_one_whole_prefill(
    thread_pool: ThreadPool,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    pool = make_pool([421], dtype, heads, head_dim, page_size)
    (whole,) = pool.attend(thread_pool, [(0, 0, 421)])
    for position in range(421):
        (row,) = pool.attend(thread_pool, [(0, position, position + 1)])
        assert torch.equal(row[0], whole[position]), position
    for chunk in (2, 3, 37, 63, 64, 65, 128, 200, 300):
        for first in range(0, 421 - chunk + 1, max(chunk // 2, 13)):
            (part,) = pool.attend(thread_pool, [(0, first, first + chunk)])
            assert torch.equal(part, whole[first : first + chunk]), (chunk, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (16, 1)])
def test_company_and_threads_change_no_bit(
    thread_pools: list[ThreadPool], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    lengths = [1, 15, 64, 65, 127, 128, 200, 257, 700]
    pool = make_pool(lengths, dtype, heads)
    pieces = [(i, length - 1, length) for i, length in enumerate(lengths)]
    pieces += [(i, max(0, length - 90), length - 1) for i, length in enumerate(lengths[1:], 1)]
    alone = [pool.attend(thread_pools[0], [piece])[0] for piece in pieces]
    for thread_pool in thread_pools:
        for order in (pieces, pieces[::-1], pieces[::2], pieces * 5):
            for piece, actual in zip(order, pool.attend(thread_pool, order), strict=True):
                assert torch.equal(actual, alone[pieces.index(piece)]), piece


@settings(max_examples=num_cases(60), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 5, 16, 64, 100]),
    group=st.integers(1, 16),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 20).map(lambda half: 2 * half) | st.sampled_from([64, 80, 112]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_mix_of_chunks_equals_the_reference_and_its_parts_alone(
    thread_pools: list[ThreadPool],
    lengths: list[int],
    page_size: int,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    pool = make_pool(lengths, dtype, (group * num_kv_heads, num_kv_heads), head_dim, page_size)
    pieces = []
    for i, length in enumerate(lengths):
        last = data.draw(st.integers(1, length))
        pieces.append((i, data.draw(st.integers(max(0, last - 130), last - 1)), last))
    for piece, actual in zip(pieces, pool.attend(thread_pools[1], pieces), strict=True):
        assert error(actual, pool.expected(piece)) < TOLERANCE[dtype]
        assert torch.equal(actual, pool.attend(thread_pools[0], [piece])[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_later_position_of_its_own_sequence_is_no_number_to_a_row(
    thread_pool: ThreadPool, poison: float, dtype: torch.dtype
) -> None:
    pool = make_pool([250], dtype)
    (clean,) = pool.attend(thread_pool, [(0, 50, 250)])
    for position in (54, 55, 63, 64, 127, 128, 249):
        page, offset = pool.tables[0][position // 64], position % 64
        k_pages, v_pages = pool.k_pages.clone(), pool.v_pages.clone()
        k_pages[page, :, offset], v_pages[page, :, offset] = poison, poison
        bad = Pool(k_pages, v_pages, pool.q, pool.tables)
        (actual,) = bad.attend(thread_pool, [(0, 50, 250)])
        assert torch.equal(actual[: position - 50], clean[: position - 50])
        assert actual[position - 50 :].isnan().any(-1).all()


def test_a_page_table_is_read_no_further_than_the_context(thread_pool: ThreadPool) -> None:
    pool = make_pool([64, 1, 129], torch.bfloat16)
    pieces = [(0, 63, 64), (1, 0, 1), (2, 120, 129)]
    before = pool.attend(thread_pool, pieces)
    wide = Pool(pool.k_pages, pool.v_pages, pool.q, [table + [10**9] for table in pool.tables])
    batch = AttentionBatch.build([0, 1, 2, 11], [64, 1, 129], wide.tables, 64)
    batch.page_table[:2, 1:] = 10**9  # an address far outside, where zeros pad the table
    q = torch.cat([pool.q[i][first:last] for i, first, last in pieces])
    assert torch.equal(attend(thread_pool, q, pool.k_pages, pool.v_pages, batch), torch.cat(before))


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_be_part_of_wider_rows(thread_pool: ThreadPool, dtype: torch.dtype) -> None:
    pool = make_pool([70], dtype)
    wide = torch.cat((pool.q[0], torch.full((70, 6, 64), torch.nan, dtype=dtype)), dim=1)
    batch = AttentionBatch.build([0, 70], [70], pool.tables, 64)
    actual = attend(thread_pool, wide[:, :9], pool.k_pages, pool.v_pages, batch)
    assert torch.equal(actual, pool.attend(thread_pool, [(0, 0, 70)])[0])


def test_a_step_without_rows_writes_nothing(thread_pool: ThreadPool) -> None:
    batch, pages = AttentionBatch.build([0], [], [], 4), torch.zeros(1, 1, 4, 8)
    assert attend(thread_pool, torch.empty(0, 2, 8), pages, pages, batch).shape == (0, 2, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 2.0, 60.0, -0.5, -60.0])
def test_scores_of_any_size_give_what_float64_gives(
    thread_pool: ThreadPool, scale: float, dtype: torch.dtype
) -> None:
    pool = make_pool([200], dtype)
    batch = AttentionBatch.build([0, 200], [200], pool.tables, 64)
    actual = attend(thread_pool, pool.q[0], pool.k_pages, pool.v_pages, batch, scale)
    k, v = (
        reference.read_pages(pages, pool.tables[0], 200).double()
        for pages in (pool.k_pages, pool.v_pages)
    )
    expected = reference.attention(pool.q[0].double(), k, v, scale)
    assert error(actual, expected) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_grow_from_block_to_block_give_what_float64_gives(
    thread_pool: ThreadPool, dtype: torch.dtype
) -> None:
    """A row may keep the maximum that it has while new scores are not far above it."""
    length, head_dim = 450, 64
    pool = make_pool([length], dtype, (3, 1), head_dim)
    pool.q[0][:, :, 0] = 1.0
    for growth in (-30.0, -3.0, 0.5, 3.0, 7.9, 30.0):  # of scores to base 2
        for block, page in enumerate(pool.tables[0]):
            pool.k_pages[page, :, :, 0] = block * growth * head_dim**0.5 / 1.4427
        (actual,) = pool.attend(thread_pool, [(0, 0, length)])
        assert error(actual, pool.expected((0, 0, length))) < 3 * TOLERANCE[dtype], growth
        for first, last in ((449, 450), (63, 65), (300, 317)):
            (part,) = pool.attend(thread_pool, [(0, first, last)])
            assert torch.equal(part, actual[first:last]), (growth, first)
