"""Which graphs a rank has: every batch of decodes that may have one finds the smallest."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from kernels.gpu.attention.paged_decode import most_splits
from kernels.gpu.batch_invariant.tiles import FEW_ROWS
from worker.model_config import ExpertsConfig
from worker.pools import PageCounts
from worker.runners.capture_sizes import CAPTURE_RANKS, CAPTURE_SIZES, capture_sizes
from worker.runners.gpu_batch import BatchSize
from worker.runners.warm_up import (
    GraphLadder,
    largest_batches,
    product_rows,
    warm_up_batches,
)

ROWS = product_rows(None, 2048)


def decodes(num_rows: int, longest: int, lora_rank: int, page_size: int) -> BatchSize:
    return BatchSize(
        rows=num_rows,
        samples=num_rows,
        decodes=num_rows,
        prefills=0,
        blocks=0,
        tiles=num_rows if lora_rank else 0,
        pages=-(-longest // page_size),
        max_splits=most_splits(longest),
        max_lora_rank=lora_rank,
        new_pages=num_rows,
    )


def fields(size: BatchSize) -> Iterator[int]:
    return (getattr(size, name) for name in BatchSize.__slots__)


@given(
    st.integers(1, CAPTURE_SIZES[-1]),
    st.integers(0, 300),
    st.integers(1, 200_000),
    st.integers(0, 200_000),
    st.integers(0, CAPTURE_RANKS[-1]),
    st.sampled_from((16, 64, 128)),
)
def test_a_batch_fits_a_graph_that_was_captured(
    num_rows: int, fewer: int, longest: int, more: int, lora_rank: int, page_size: int
) -> None:
    ladder = GraphLadder(
        page_size, longest + more, has_adapters=True, rows=capture_sizes(num_rows + fewer)
    )
    exact = decodes(num_rows, longest, lora_rank, page_size)
    size = ladder.size_for(exact, longest)
    assert size in set(ladder.all_sizes())
    assert size is not None and all(
        a <= b for a, b in zip(fields(exact), fields(size), strict=True)
    )
    assert (size.max_lora_rank == 0) == (lora_rank == 0)


def test_batches_and_adapters_that_are_too_large_have_no_graph() -> None:
    ladder = GraphLadder(16, 4096, has_adapters=True, rows=CAPTURE_SIZES)
    exact = decodes(CAPTURE_SIZES[-1], 100, CAPTURE_RANKS[-1], 16)
    assert ladder.size_for(exact, 100) is not None
    assert ladder.size_for(replace(exact, rows=CAPTURE_SIZES[-1] + 1), 100) is None
    assert ladder.size_for(replace(exact, max_lora_rank=CAPTURE_RANKS[-1] + 1), 100) is None


def test_a_rank_without_slots_has_no_graphs_of_adapters() -> None:
    few = list(GraphLadder(16, 4096, has_adapters=False, rows=CAPTURE_SIZES).all_sizes())
    assert len(few) == len(CAPTURE_SIZES) and not any(size.max_lora_rank for size in few)
    assert few[0].rows == CAPTURE_SIZES[-1], "the largest first: all others fit in its memory"


@given(st.integers(1, 2000))
def test_graphs_are_of_as_many_rows_as_there_may_be_sequences(max_num_seqs: int) -> None:
    sizes = capture_sizes(max_num_seqs)
    assert sizes == CAPTURE_SIZES[: len(sizes)]
    assert sizes[-1] >= min(max_num_seqs, CAPTURE_SIZES[-1])
    assert all(size < max_num_seqs for size in sizes[:-1])


@pytest.mark.parametrize(("num_pages", "max_model_len"), [(1, 4096), (2, 20), (40, 4096), (40, 7)])
def test_batches_fit_the_pages_that_there_are(num_pages: int, max_model_len: int) -> None:
    batches = list(
        warm_up_batches(ROWS, PageCounts(num_pages), 16, max_model_len, has_adapters=True)
    )
    most = min(16 * num_pages, max_model_len)
    assert batches[-1].context_lens == [most]
    assert len({len(batch.token_ids) for batch in batches}) == 4, "every way, short as prompts are"
    for batch in batches:
        assert max(batch.context_lens) <= most
        assert batch.query_starts[-1] == len(batch.token_ids) <= max(batch.query_starts)
        for length, table in zip(batch.context_lens, batch.page_tables, strict=True):
            assert len(table) * 16 >= length and max(table) < num_pages


def test_sequences_of_a_batch_have_states_of_their_own() -> None:
    batches = list(warm_up_batches(ROWS, PageCounts(40, state=3), 16, 7, has_adapters=False))
    assert all(max(batch.state_pages) < 3 for batch in batches)


def test_prompts_of_many_rows_for_each_expert_come_where_a_step_may_have_them() -> None:
    mixtral = ExpertsConfig(8, 2, 14336, renormalize=True, layers=(0,))
    assert product_rows(mixtral, 1028) == (*ROWS, 1028)
    assert product_rows(mixtral, 1027) == ROWS
    assert 1028 * mixtral.top_k // mixtral.num_experts == FEW_ROWS + 1


@given(
    *(st.integers(1, 5000), st.integers(1, 300), st.integers(2, 3000), st.integers(0, 3)),
    st.booleans(),
)
def test_the_largest_batches_have_all_that_a_step_may_have(
    num_tokens: int, max_num_seqs: int, max_model_len: int, num_states: int, has_adapters: bool
) -> None:
    decodes, prompts = largest_batches(
        num_tokens, max_num_seqs, max_model_len, 16, num_states, has_adapters=has_adapters
    )
    num_samples = min(max_num_seqs, num_tokens)
    assert all(decodes.decodes) and not any(prompts.decodes)
    assert decodes.query_starts[-1] == min(num_samples, num_states or num_samples)
    assert set(decodes.context_lens) == {max_model_len}
    most = num_states * max_model_len or num_tokens
    assert prompts.query_starts[-1] == min(num_tokens, most)
    assert len(prompts.sample_rows) == min(num_samples, most)
    for batch in (decodes, prompts):
        assert len(batch.token_ids) == batch.query_starts[-1]
        assert batch.sample_rows[-1] == len(batch.token_ids) - 1 and batch.sample_rows[0] >= 0
        assert max(batch.context_lens) <= max_model_len
        assert all(len(table) * 16 >= max_model_len for table in batch.page_tables)
        assert {page for table in batch.page_tables for page in table} == {0}
        assert len(batch.state_pages) <= (num_states or len(batch.state_pages))
        assert sum(run.stop - run.start for run in batch.runs) == (
            len(batch.token_ids) if has_adapters else 0
        )
