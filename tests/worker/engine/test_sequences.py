"""The rules that a plan must keep about copies and shared pages, before anything is computed."""

import pytest

from worker.engine.sequences import SequenceTable, build_input_batch
from worker.pools import PageCounts
from worker.protocol import Chunk, PageCopy, Plan, SamplingParams, SequenceStart

PAGE = 4


@pytest.fixture
def table():
    """Return a table where sequence 1 has six positions in pages 0 and 1."""
    table = SequenceTable(
        page_size=PAGE, pages=PageCounts(8), host_pages=PageCounts(2), max_model_len=64
    )
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
    table.apply(plan(starts=[start(2, (0, 5), 5)], copies=[FORK], chunks=[chunk]))
    assert build_input_batch([chunk], table).new_pages == []
    assert list(table[2].pages) == [0, 5]
    assert table[2].num_tokens == 6


def test_a_fork_outlives_the_sequence_it_came_from_in_one_plan(table):
    table.apply(plan(ends=[1], starts=[start(2, (0, 5), 5)], copies=[FORK]))
    assert table[2].num_tokens == 5


def test_a_page_may_be_saved_and_given_out_in_one_plan(table):
    chunk = Chunk(2, 0, (1,), (1,), False)
    copies = [PageCopy("save", 1, 0, PAGE)]
    second = plan(ends=[1], starts=[start(2)], copies=copies, chunks=[chunk])
    table.apply(second)
    assert build_input_batch([chunk], table).new_pages == [1]


def test_a_page_may_be_restored_for_a_sequence_that_starts(table):
    copies = [PageCopy("save", 0, 1, PAGE), PageCopy("restore", 1, 6, PAGE)]
    table.apply(plan(starts=[start(2, (6,), PAGE)], copies=copies))
    assert list(table[2].pages) == [6]


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


class TestWindows:
    """Layers with a window of five positions have pages of their own."""

    @pytest.fixture
    def table(self):
        """Return a table where sequence 1 has ten positions."""
        table = SequenceTable(
            page_size=PAGE,
            pages=PageCounts(8, window=6),
            host_pages=PageCounts(2, window=1),
            max_model_len=64,
            window=5,
        )
        chunk = Chunk(1, 0, tuple(range(10)), (0, 1, 2), True, (), (3, 4, 5))
        table.apply(plan(starts=[start(1)], chunks=[chunk]))
        rows = build_input_batch([chunk], table)
        assert (rows.new_pages, rows.new_window_pages) == ([0, 1, 2], [3, 4, 5])
        return table

    def test_a_table_has_no_page_that_no_row_sees(self, table):
        rows = build_input_batch([Chunk(1, 0, tuple(range(10)), (), True)], table)
        assert list(map(list, rows.window_tables)) == [[3, 4, 5]]  # of the first row
        chunk = Chunk(1, 10, (1,), (), True)
        table.apply(plan(chunks=[chunk]))
        rows = build_input_batch([chunk], table)
        assert list(map(list, rows.page_tables)) == [[0, 1, 2]]
        assert list(map(list, rows.window_tables)) == [[4, 4, 5]]

    def test_a_page_that_is_left_behind_may_be_given_out(self, table):
        given = Chunk(2, 0, (5,), (7,), True, (), (3,))
        table.apply(plan(starts=[start(2)], chunks=[Chunk(1, 10, (1,), (), True), given]))
        assert list(table[2].window_pages) == [3]

    def test_a_page_that_is_left_behind_may_be_written_over(self, table):
        table.apply(plan(copies=[PageCopy("restore", 0, 3, PAGE, "window")]))
        with pytest.raises(AssertionError, match="a copy over a page of 1"):
            table.apply(plan(copies=[PageCopy("restore", 0, 4, PAGE, "window")]))

    def test_a_sequence_starts_on_the_pages_of_its_window(self, table):
        table.apply(plan(starts=[window_start(2, (4, 6), (1,), 8)]))
        assert (table[2].first_window, list(table[2].window_pages)) == (1, [1])

    @pytest.mark.parametrize("window_pages", [(), (1, 2, 3)])
    def test_a_sequence_that_lacks_them_or_has_too_many_is_refused(self, table, window_pages):
        with pytest.raises(AssertionError, match="window pages for 8 cached tokens"):
            table.apply(plan(starts=[window_start(2, (4, 6), window_pages, 8)]))

    def test_a_fork_has_a_page_of_each_kind(self, table):
        forks = [PageCopy("fork", 2, 7, 2), PageCopy("fork", 5, 0, 2, "window")]
        starts = [window_start(2, (0, 1, 7), (4, 0), 10)]
        table.apply(plan(starts=starts, copies=forks))
        assert list(table[2].window_pages) == [4, 0]
        with pytest.raises(AssertionError, match="holds a fork of 0"):
            table.apply(plan(ends=[2], starts=starts, copies=forks[:1]))

    @pytest.mark.parametrize("new_window_pages", [(), (0, 1)])
    def test_tables_grow_together(self, table, new_window_pages):
        chunk = Chunk(1, 10, (1, 2, 3), (3,), True, (), new_window_pages)
        with pytest.raises(AssertionError, match="page tables of unequal lengths"):
            table.apply(plan(chunks=[chunk]))

    @pytest.mark.parametrize(
        "copy",
        [
            PageCopy("save", 6, 0, PAGE, "window"),
            PageCopy("save", 0, 1, PAGE, "window"),
            PageCopy("restore", 1, 0, PAGE, "window"),
        ],
        ids=str,
    )
    def test_a_copy_beyond_the_pool_is_refused(self, table, copy):
        with pytest.raises(AssertionError, match="no such page"):
            table.apply(plan(copies=[copy]))


def window_start(seq_id, pages, window_pages, num_cached_tokens):
    return SequenceStart(
        seq_id, None, SamplingParams(), 12, pages, num_cached_tokens, (), window_pages
    )


def test_pages_of_layers_that_are_not_there_are_refused(table):
    with pytest.raises(AssertionError, match="page tables of unequal lengths"):
        table.apply(plan(chunks=[Chunk(1, 6, (1,), (), True, (), (0,))]))
