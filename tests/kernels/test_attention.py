"""kernels.attention: right over poisoned pages, and the same bits in any company."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.attention import AttentionBatch, paged_attention, write_kv
from kernels.native.backend import NativeKernels
from kernels.native.library import Library, native_library
from kernels.native.program import Step, ThreadPool
from tests.random_cases import num_cases

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(params=["native", "avx2", "torch"], autouse=True)
def form(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, avx2_library: Library | None
) -> None:
    """Run every test in C, as this machine has it and as one with AVX2 would, and in torch."""
    if request.param == "torch":
        return
    library = native_library() if request.param == "native" else avx2_library
    if library is None:
        pytest.skip("this machine cannot have the native library")
    kernels = NativeKernels(ThreadPool(library, 2))

    def attend(
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        step = Step(q.shape[0], batch)
        return kernels.paged_attention(q, k_pages, v_pages, step, scale, window, sinks)

    monkeypatch.setitem(globals(), "paged_attention", attend)


@dataclass(frozen=True, slots=True)
class Pool:
    """Sequences of random K and V scattered over pages whose every other value is NaN."""

    k_pages: Tensor
    v_pages: Tensor
    q: tuple[Tensor, ...]  # of each sequence, for every position
    tables: tuple[list[int], ...]
    page_size: int
    window: int | None = None  # of all rows
    sinks: Tensor | None = None  # of the heads

    def attend(self, pieces: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Attend with (sequence, first, last) runs of positions in one call."""
        starts = [0]
        for _, first, last in pieces:
            starts.append(starts[-1] + last - first)
        batch = AttentionBatch.build(
            starts,
            [last for _, _, last in pieces],
            [self.tables[i] for i, _, _ in pieces],
            self.page_size,
        )
        q = torch.cat([self.q[i][first:last] for i, first, last in pieces])
        scale = q.shape[-1] ** -0.5
        out = paged_attention(q, self.k_pages, self.v_pages, batch, scale, self.window, self.sinks)
        assert out.dtype == q.dtype
        return [out[a:b] for a, b in zip(starts, starts[1:], strict=False)]

    def expected(self, sequence: int, first: int, last: int) -> Tensor:
        """Return what the float64 reference makes of a run of positions."""
        table = self.tables[sequence]
        k = reference.read_pages(self.k_pages, table, last).double()
        v = reference.read_pages(self.v_pages, table, last).double()
        q = self.q[sequence][first:last].double()
        return reference.attention(q, k, v, q.shape[-1] ** -0.5, self.window, self.sinks)


def make_pool(
    lengths: Sequence[int],
    dtype: torch.dtype,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    page_size: int = 64,
    seed: int = 0,
) -> Pool:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + 3
    k_pages = torch.full((num_pages, heads[1], page_size, head_dim), torch.nan, dtype=dtype)
    v_pages = k_pages.clone()
    free = torch.randperm(num_pages, generator=generator).tolist()
    tables, queries = [], []
    for length, count in zip(lengths, counts, strict=True):
        table, free = free[:count], free[count:]
        k, v = (torch.randn(length, heads[1], head_dim, generator=generator) for _ in range(2))
        batch = AttentionBatch.build([0, length], [length], [table], page_size)
        write_kv(k.to(dtype), v.to(dtype), k_pages, v_pages, batch.kv_loc)
        tables.append([*table, 10**6])  # a page id past the context is never looked at
        queries.append(torch.randn(length, heads[0], head_dim, generator=generator).to(dtype))
    return Pool(k_pages, v_pages, tuple(queries), tuple(tables), page_size)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (4, 1), (8, 1)])
def test_decodes_and_prefills_agree_with_float64(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    for page_size in (16, 64):
        lengths = [page_size - 1, page_size, page_size + 1, 1, 127, 128, 129, 300]
        pool = make_pool(lengths, dtype, heads, head_dim, page_size)
        decodes = [(i, length - 1, length) for i, length in enumerate(lengths)]
        prefills = [(i, 0, length) for i, length in enumerate(lengths)]
        for pieces in (decodes, prefills, decodes[:4] + prefills[4:], [(7, 150, 290)]):
            for piece, actual in zip(pieces, pool.attend(pieces), strict=True):
                assert error(actual, pool.expected(*piece)) < TOLERANCE[dtype], piece


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (64, 64), (48, 16), (256, 32)])
def test_chunking_and_decoding_give_the_bits_of_one_whole_prefill(
    page_size: int, head_dim: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    length = 421
    pool = make_pool([length], dtype, heads, head_dim, page_size)
    (whole,) = pool.attend([(0, 0, length)])
    for chunk in (1, 2, 3, 37, 63, 64, 65, 128, 200, 300):
        step = chunk if chunk > 3 else 29
        for first in range(0, length - chunk + 1, step):
            (part,) = pool.attend([(0, first, first + chunk)])
            assert torch.equal(part, whole[first : first + chunk]), (chunk, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (9, 3)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_company_changes_no_bit(page_size: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    lengths = [1, 15, 64, 65, 127, 128, 129, 200, 257, 700, 1300]
    pool = make_pool(lengths, dtype, heads, page_size=page_size)
    pieces = [(i, length - 1, length) for i, length in enumerate(lengths)]
    pieces += [(i, max(0, length - 70), length - 1) for i, length in enumerate(lengths[1:], 1)]
    alone = [pool.attend([piece])[0] for piece in pieces]
    for order in (pieces, pieces[::-1], pieces[::2], pieces[3:9]):
        for piece, actual in zip(order, pool.attend(order), strict=True):
            assert torch.equal(actual, alone[pieces.index(piece)]), piece


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_has_the_same_bits_among_many(dtype: torch.dtype) -> None:
    pool = make_pool([150, 90, 310], dtype)
    pieces = [(0, 149, 150), (1, 89, 90), (2, 309, 310)]
    alone = [pool.attend([piece])[0] for piece in pieces]
    for count in (1, 2, 4, 17, 64, 100):
        for i, actual in enumerate(pool.attend(pieces * count)):
            assert torch.equal(actual, alone[i % 3])


@settings(max_examples=num_cases(40), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 8, 16, 48, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_mix_of_chunks_equals_the_reference_and_its_parts_alone(
    lengths: list[int], page_size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    pool = make_pool(lengths, dtype, head_dim=32, page_size=page_size)
    pieces = []
    for i, length in enumerate(lengths):
        last = data.draw(st.integers(1, length))
        pieces.append((i, data.draw(st.integers(max(0, last - 130), last - 1)), last))
    for piece, actual in zip(pieces, pool.attend(pieces), strict=True):
        assert error(actual, pool.expected(*piece)) < TOLERANCE[dtype]
        assert torch.equal(actual, pool.attend([piece])[0])


WINDOWS = (1, 2, 33, 64, 65, 100, 128, 300)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 1)])
@pytest.mark.parametrize("page_size", [16, 48, 64])
def test_rows_see_no_more_than_their_windows(
    page_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    lengths = [1, 63, 64, 65, 128, 129, 300, 421]
    full = make_pool(lengths, dtype, heads, 32, page_size)
    decodes = [(i, length - 1, length) for i, length in enumerate(lengths)]
    prefills = [(i, 0, length) for i, length in enumerate(lengths)]
    for window in WINDOWS:
        pool = replace(full, window=window)
        for pieces in (decodes, prefills, [(7, 150, 290), (6, 64, 65), (6, 70, 300)]):
            for piece, actual in zip(pieces, pool.attend(pieces), strict=True):
                assert error(actual, pool.expected(*piece)) < TOLERANCE[dtype], (window, piece)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (9, 3)])
def test_chunks_change_no_bit_under_a_window(heads: tuple[int, int], dtype: torch.dtype) -> None:
    length = 330
    full = make_pool([length], dtype, heads, 32, 16)
    (unbounded,) = full.attend([(0, 0, length)])
    for window in (*WINDOWS, length + 5):
        pool = replace(full, window=window)
        (whole,) = pool.attend([(0, 0, length)])
        assert torch.equal(whole[:window], unbounded[:window])  # while they are not full
        for chunk in (1, 3, 37, 64, 200):
            for first in range(0, length - chunk + 1, chunk if chunk > 3 else 29):
                (part,) = pool.attend([(0, first, first + chunk)])
                assert torch.equal(part, whole[first : first + chunk]), (window, chunk, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 50, 64, 127])
def test_what_lies_before_a_window_changes_no_bit(window: int, dtype: torch.dtype) -> None:
    length = 300
    pool = replace(make_pool([length], dtype, page_size=16), window=window)
    for first in (200, length - 1):
        (before,) = pool.attend([(0, first, length)])
        for position in range(first + 1 - window):
            page = pool.tables[0][position // 16]
            for pages in (pool.k_pages, pool.v_pages):
                pages[page, :, position % 16].mul_(-3.0)
        (after,) = pool.attend([(0, first, length)])
        assert torch.equal(before, after)


def with_sinks(pool: Pool, window: int | None = None, louder: float = 0.0) -> Pool:
    num_heads = pool.q[0].shape[1]
    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(9)) * 2 + louder
    return replace(pool, window=window, sinks=sinks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 1)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_sinks_join_the_softmax_of_their_heads(
    page_size: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    lengths = [1, 63, 64, 65, 128, 129, 300]
    plain = make_pool(lengths, dtype, heads, 32, page_size)
    decodes = [(i, length - 1, length) for i, length in enumerate(lengths)]
    prefills = [(i, 0, length) for i, length in enumerate(lengths)]
    for window, louder in ((None, 0.0), (None, 30.0), (None, -30.0), (50, 0.0), (64, 5.0)):
        pool = with_sinks(plain, window, louder)
        for pieces in (decodes, prefills, [(6, 150, 290), (5, 64, 65)]):
            for piece, actual in zip(pieces, pool.attend(pieces), strict=True):
                expected = pool.expected(*piece)
                assert error(actual, expected) < TOLERANCE[dtype], (window, louder, piece)


def test_sinks_of_any_size_leave_numbers() -> None:
    pool = make_pool([150], torch.float32)
    for size in (-torch.inf, -1e30, -200.0, 200.0, 1e30):
        sunk = replace(pool, sinks=torch.full((9,), size))
        (actual,) = sunk.attend([(0, 0, 150)])
        (plain,) = pool.attend([(0, 0, 150)])
        assert error(actual, plain.double()) < 1e-6 if size < 0 else actual.abs().max() < 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (9, 3)])
@pytest.mark.parametrize("window", [None, 50, 128])
def test_chunks_and_company_change_no_bit_beside_sinks(
    window: int | None, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    length = 330
    pool = with_sinks(make_pool([length, 90], dtype, heads, 32, 16), window)
    (whole,) = pool.attend([(0, 0, length)])
    for chunk in (1, 3, 37, 64, 200):
        for first in range(0, length - chunk + 1, chunk if chunk > 3 else 29):
            part, _ = pool.attend([(0, first, first + chunk), (1, 89, 90)])
            assert torch.equal(part, whole[first : first + chunk]), (chunk, first)


def test_a_neighbour_whose_values_are_nan_changes_nothing() -> None:
    pool = make_pool([100, 200], torch.float32)
    (alone,) = pool.attend([(0, 99, 100)])
    pool.k_pages[pool.tables[1][:-1]] = torch.nan
    pool.v_pages[pool.tables[1][:-1]] = torch.nan
    first, second = pool.attend([(0, 99, 100), (1, 199, 200)])
    assert torch.equal(first, alone)
    assert second.isnan().all()  # its own NaN is not hidden either


def test_the_batch_tells_where_each_row_goes() -> None:
    batch = AttentionBatch.build([0, 1, 4], [6, 3], [[7, 2, 99], [5]], page_size=4)
    assert batch.positions.tolist() == [5, 0, 1, 2]
    assert batch.kv_loc.tolist() == [2 * 4 + 1, 20, 21, 22]
    assert batch.page_table.tolist() == [[7, 2], [5, 0]]
    assert (batch.query_starts, batch.context_lens) == ((0, 1, 4), (6, 3))


def test_an_empty_step_attends_to_nothing() -> None:
    batch = AttentionBatch.build([0], [], [], page_size=4)
    pages = torch.zeros(1, 1, 4, 8)
    assert paged_attention(torch.empty(0, 2, 8), pages, pages, batch, 1.0).shape == (0, 2, 8)


def test_queries_and_keys_may_be_views_of_a_fused_projection() -> None:
    pool = make_pool([10], torch.float32)
    wide = torch.cat((pool.q[0], torch.zeros(10, 6, 64)), dim=1)
    batch = AttentionBatch.build([0, 10], [10], pool.tables, 64)
    actual = paged_attention(wide[:, :9], pool.k_pages, pool.v_pages, batch, 0.125)
    assert torch.equal(actual, pool.attend([(0, 0, 10)])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_any_size_give_what_float64_gives(dtype: torch.dtype) -> None:
    pool = make_pool([200], dtype)
    for factor in (1e-3, 30.0, 1e3):
        loud = Pool(pool.k_pages, pool.v_pages, (pool.q[0] * factor,), pool.tables, 64)
        (actual,) = loud.attend([(0, 0, 200)])
        assert error(actual, loud.expected(0, 0, 200)) < 3 * TOLERANCE[dtype], factor
