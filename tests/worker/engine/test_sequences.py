"""The rules that a plan must keep about copies and shared pages, before anything is computed."""

import pytest

from worker.engine.sequences import SequenceTable
from worker.protocol import Chunk, PageCopy, Plan, SamplingParams, SequenceStart

PAGE = 4


@pytest.fixture
def table():
    """Return a table where sequence 1 has six positions in pages 0 and 1."""
    table = SequenceTable(page_size=PAGE, num_pages=8, num_host_pages=2, max_model_len=64)
    chunk = Chunk(1, 0, tuple(range(6)), (0, 1), True)
    table.apply(plan(starts=[start(1)], chunks=[chunk]))
    return table


def plan(*, ends=(), starts=(), copies=(), chunks=()):
    return Plan(1, tuple(ends), tuple(starts), tuple(chunks), tuple(copies))


def start(seq_id, pages=(), num_cached_tokens=0):
    return SequenceStart(seq_id, None, SamplingParams(), 6, pages, num_cached_tokens, ())


FORK = PageCopy("fork", 1, 5, 1)


def test_a_fork_starts_within_a_page_of_its_own(table):
    chunk = Chunk(2, 5, (5,), (), True)
    assert table.apply(plan(starts=[start(2, (0, 5), 5)], copies=[FORK], chunks=[chunk])) == (
        [],
        [],
    )
    assert table[2].pages == [0, 5]
    assert table[2].num_tokens == 6


def test_a_fork_outlives_the_sequence_it_came_from_in_one_plan(table):
    table.apply(plan(ends=[1], starts=[start(2, (0, 5), 5)], copies=[FORK]))
    assert table[2].num_tokens == 5


def test_a_page_may_be_saved_and_given_out_in_one_plan(table):
    chunk = Chunk(2, 0, (1,), (1,), False)
    copies = [PageCopy("save", 1, 0, PAGE)]
    second = plan(ends=[1], starts=[start(2)], copies=copies, chunks=[chunk])
    assert table.apply(second) == ([1], [])


def test_a_page_may_be_restored_for_a_sequence_that_starts(table):
    copies = [PageCopy("save", 0, 1, PAGE), PageCopy("restore", 1, 6, PAGE)]
    table.apply(plan(starts=[start(2, (6,), PAGE)], copies=copies))
    assert table[2].pages == [6]


@pytest.mark.parametrize(
    ("pages", "num_cached_tokens", "copies", "complaint"),
    [
        ((0, 1), 5, [], "which holds a fork of 0"),
        ((0, 5), 6, [FORK], "which holds a fork of 1"),
        ((0, 5), 5, [FORK, PageCopy("restore", 0, 5, PAGE)], "which holds a fork of 0"),
        ((0, 5), 5, [PageCopy("fork", 1, 6, 1)], "which holds a fork of 0"),
        ((0,), 5, [], "1 pages for 5"),
        ((0, 5, 6), 5, [FORK], "3 pages for 5"),
    ],
)
def test_a_page_shared_in_part_without_a_fork_is_refused(
    table, pages, num_cached_tokens, copies, complaint
):
    with pytest.raises(AssertionError, match=complaint):
        table.apply(plan(starts=[start(2, pages, num_cached_tokens)], copies=copies))


def test_two_sequences_cannot_start_within_one_page(table):
    starts = [start(2, (0, 5), 5), start(3, (0, 5), 5)]
    with pytest.raises(AssertionError, match="sequence 3 starts 1 positions into page 5"):
        table.apply(plan(starts=starts, copies=[FORK]))


@pytest.mark.parametrize(
    ("copy", "complaint"),
    [
        (PageCopy("save", 8, 0, PAGE), "no such page to copy from"),
        (PageCopy("save", 0, 2, PAGE), "no such page to copy to"),
        (PageCopy("restore", 2, 5, PAGE), "no such page to copy from"),
        (PageCopy("restore", 0, 8, PAGE), "no such page to copy to"),
        (PageCopy("restore", -1, 5, PAGE), "no such page to copy from"),
        (PageCopy("fork", 1, -1, 1), "no such page to copy to"),
        (PageCopy("fork", 5, 5, 1), "copied to itself"),
        (PageCopy("fork", 1, 5, 0), "no such size"),
        (PageCopy("fork", 1, 5, PAGE + 1), "no such size"),
        (PageCopy("save", 0, 0, PAGE - 1), "only forks copy in part"),
        (PageCopy("restore", 0, 5, PAGE - 1), "only forks copy in part"),
        (PageCopy("restore", 0, 1, PAGE), "a copy over a page of 1"),
        (PageCopy("fork", 0, 1, 1), "a copy over a page of 1"),
    ],
)
def test_a_copy_that_cannot_be_right_is_refused(table, copy, complaint):
    with pytest.raises(AssertionError, match=complaint):
        table.apply(plan(copies=[copy]))


def test_a_page_that_a_sequence_starts_on_cannot_be_given_out_in_the_same_plan(table):
    chunk = Chunk(3, 0, (1,), (5,), False)
    with pytest.raises(AssertionError, match="given out again"):
        table.apply(plan(starts=[start(2, (0, 5), 5), start(3)], copies=[FORK], chunks=[chunk]))
