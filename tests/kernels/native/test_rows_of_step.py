"""kernels.native rows_of_step.c: where the rows of a step lie, and what goes into its layers."""

from array import array
from dataclasses import astuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention_batch import AttentionBatch, RowArrays, lay_out_rows
from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import ThreadPool
from tests.random_cases import num_cases


@pytest.fixture(scope="module")
def library(library_of_products: Library) -> Library:
    return library_of_products


@pytest.fixture(scope="module")
def kernels(library: Library) -> NativeKernels:
    return NativeKernels(ThreadPool(library, 1))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], int]:
    """Return the arguments of `AttentionBatch.build`, some page lists longer than they must be."""
    page_size = draw(st.sampled_from([1, 3, 16, 64]))
    starts, lengths, tables = [0], [], []
    for _ in range(draw(st.integers(0, 6))):
        lengths.append(draw(st.integers(1, 200)))
        starts.append(starts[-1] + draw(st.integers(1, lengths[-1])))
        num_pages = -(-lengths[-1] // page_size) + draw(st.integers(0, 2))
        pages = st.integers(0, 2**31 - 1)
        tables.append(draw(st.lists(pages, min_size=num_pages, max_size=num_pages)))
    return starts, lengths, tables, page_size


@settings(max_examples=num_cases(100))
@given(step=steps(), are_arrays=st.booleans())
def test_rows_lie_where_numpy_says(
    kernels: NativeKernels,
    step: tuple[list[int], list[int], list[list[int]], int],
    are_arrays: bool,
) -> None:
    starts, lengths, tables, page_size = step
    given_tables = [array("i", table) for table in tables] if are_arrays else tables
    batch = AttentionBatch.build(starts, lengths, given_tables, page_size, kernels.lay_out_rows)
    expected = RowArrays.empty(starts[-1], len(lengths), batch.page_table.shape[1])
    lay_out_rows(expected, starts, lengths, tables, page_size)
    for found, wanted in zip(astuple(batch.arrays), astuple(expected), strict=True):
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("starts", "lengths", "tables"),
    [([0, 2], [1], [[0]]), ([0, 0], [1], [[0]]), ([0, 1], [5], [[0]]), ([0, 1], [1], [])],
)
def test_a_step_that_cannot_be_is_refused(
    kernels: NativeKernels, starts: list[int], lengths: list[int], tables: list[list[int]]
) -> None:
    with pytest.raises(AssertionError):
        AttentionBatch.build(starts, lengths, tables, 4, kernels.lay_out_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 15, 16, 576, 577])
@pytest.mark.parametrize("scale", [1.0, 24.0, 0.1])
def test_embeddings_are_torchs(
    kernels: NativeKernels, dtype: torch.dtype, width: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(width)
    table = torch.randn(50, width, generator=generator).to(dtype)
    for num_rows in (0, 1, 3, 4, 5, 40):
        ids = torch.randint(50, (num_rows,), generator=generator)
        out = torch.full((num_rows, width), torch.nan)
        kernels.look_up(ids, table, scale, out)
        assert torch.equal(out, F.embedding(ids, table).float() * scale)


@pytest.mark.parametrize("bad", [-1, 50, 2**62])
def test_no_memory_is_read_for_a_token_that_is_not_in_the_table(
    kernels: NativeKernels, bad: int
) -> None:
    out = torch.zeros(3, 8)
    with pytest.raises(AssertionError, match="no rows of a table of 50"):
        kernels.look_up(torch.tensor([1, bad, 2]), torch.ones(50, 8), 1.0, out)
    assert not out.any()


def test_numbers_alone_keep_their_tokens(kernels: NativeKernels) -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, -3e38, 0.0])
    token_ids = torch.arange(6)
    kept = kernels.where_finite(values, token_ids, -1)
    assert kept.tolist() == [0, -1, -1, -1, 4, 5] and kept.dtype == torch.int64
    token_ids.fill_(9)  # as the next step does with what a program has written
    assert kept.tolist() == [0, -1, -1, -1, 4, 5]
