"""The fake answers like a rank and catches plans that would corrupt a real one."""

import pytest

from worker.pools import PageCounts
from worker.protocol import (
    GENESIS,
    Chunk,
    PageCopy,
    Plan,
    SamplingParams,
    SequenceStart,
    encode_plan,
)
from worker.testing.fake_rank import FakeRank, fake_continuation

TOKENS = tuple(range(10, 22))  # three pages of 4


class Driver:
    """Numbers and sends plans to one fake rank."""

    def __init__(self) -> None:
        self.rank = FakeRank(page_size=4, num_slots=2)
        self.rank.allocate(PageCounts(16), PageCounts(4))
        self.rank.load_adapter(0, "aa")
        self.rank.load_adapter(1, "bb")
        self._digest = GENESIS
        self._step = 0

    def step(self, chunks=(), starts=(), ends=(), copies=()):
        self._step += 1
        plan = Plan(self._step, tuple(ends), tuple(starts), tuple(chunks), tuple(copies))
        frame, self._digest = encode_plan(plan, self._digest)
        output = self.rank.step(frame).output
        return [token.token_id for token in output.tokens]


def start(seq_id, slot=0, pages=(), sampling=None, history=(), num_cached_tokens=None):
    sampling = sampling or SamplingParams()
    cached = 4 * len(pages) if num_cached_tokens is None else num_cached_tokens
    return SequenceStart(seq_id, slot, sampling, 12, pages, cached, history)


@pytest.fixture
def driver():
    """Return a driver whose pages 5, 3, 8 hold TOKENS of slot 0, computed by a sequence gone."""
    driver = Driver()
    driver.step([Chunk(1, 0, TOKENS, (5, 3, 8), True)], [start(1)])
    driver.step(ends=[1])
    return driver


def test_tokens_depend_on_adapter_prompt_and_seed_only():
    driver = Driver()
    sampled = []
    for seq_id, slot, first, seed in ((1, 0, 0, 0), (2, 0, 6, 0), (3, 1, 0, 0), (4, None, 0, 9)):
        starts = [start(seq_id, slot, sampling=SamplingParams(seed=seed))]
        pages = tuple(range(3 * (seq_id - 1), 3 * seq_id))
        if first:
            driver.step([Chunk(seq_id, 0, TOKENS[:first], pages[:2], False)], starts)
            starts, pages = [], pages[2:]
        sampled += driver.step([Chunk(seq_id, first, TOKENS[first:], pages, True)], starts)
    assert sampled[0] == sampled[1] == fake_continuation("aa", TOKENS, 1)[0]
    assert sampled[2] == fake_continuation("bb", TOKENS, 1)[0] != sampled[0]
    assert sampled[3] == fake_continuation(None, TOKENS, 1, seed=9)[0] != sampled[0]


def test_decoding_continues_what_was_drawn(driver):
    sampled = driver.step([Chunk(2, 0, TOKENS, (0, 1, 2), True)], [start(2)])
    sampled += driver.step([Chunk(2, 12, (sampled[0],), (9,), True)])
    assert tuple(sampled) == fake_continuation("aa", TOKENS, 2)


def test_a_cached_prefix_continues_to_the_same_token(driver):
    chunk = Chunk(2, 8, TOKENS[8:], (9,), True)
    assert driver.step([chunk], [start(2, pages=(5, 3))]) == [fake_continuation("aa", TOKENS, 1)[0]]


@pytest.mark.parametrize(
    ("bad_start", "complaint"),
    [
        (start(2, slot=1, pages=(5, 3)), "of another prefix or adapter"),
        (start(2, slot=None, pages=(5,)), "of another prefix or adapter"),
        (start(2, pages=(3, 5)), "of another prefix or adapter"),
        (start(2, pages=(5, 8)), "of another prefix or adapter"),
        (start(2, pages=(5, 7)), "was never computed"),
        (start(2, pages=(5,), sampling=SamplingParams(presence_penalty=1.0)), "wrong history"),
    ],
)
def test_pages_that_hold_something_else_are_noticed(driver, bad_start, complaint):
    with pytest.raises(AssertionError, match=complaint):
        driver.step(starts=[bad_start])


def test_a_page_that_was_given_to_another_sequence_is_noticed(driver):
    driver.step([Chunk(2, 0, (1,), (3,), False)], [start(2)])
    with pytest.raises(AssertionError, match="page 3 offset 0 is of another prefix"):
        driver.step(starts=[start(3, pages=(5, 3))])


def test_a_page_that_a_running_sequence_holds_cannot_be_given_out(driver):
    driver.step(starts=[start(2, pages=(5,))])
    with pytest.raises(AssertionError, match="page 5 is given out while a sequence holds it"):
        driver.step([Chunk(3, 0, (1,), (5,), False)], [start(3)])


def test_a_slot_in_use_cannot_change(driver):
    driver.step(starts=[start(2)])
    with pytest.raises(AssertionError, match="slot 0 changes"):
        driver.rank.load_adapter(0, "cc")
    with pytest.raises(AssertionError, match="slot 0 changes"):
        driver.rank.clear_slot(0, "aa")
    driver.step(ends=[2])
    driver.rank.clear_slot(0, "aa")
    with pytest.raises(AssertionError, match="empty slot 0"):
        driver.step(starts=[start(3)])


def test_a_chunk_must_follow_the_last_one_and_have_room(driver):
    with pytest.raises(AssertionError, match="chunk at 2, not 0"):
        driver.step([Chunk(2, 2, (1,), (0,), False)], [start(2)])
    with pytest.raises(AssertionError, match="too few pages"):
        driver.step([Chunk(3, 0, TOKENS, (0, 1), False)], [start(3)])


SAVE, RESTORE = PageCopy("save", 3, 1, 4), PageCopy("restore", 1, 9, 4)


def test_a_saved_page_comes_back_to_another_place(driver):
    driver.step([Chunk(2, 0, (1,), (3,), False)], [start(2)], copies=[SAVE])
    chunk = Chunk(3, 8, TOKENS[8:], (10,), True)
    sampled = driver.step([chunk], [start(3, pages=(5, 9))], copies=[RESTORE])
    assert sampled == [fake_continuation("aa", TOKENS, 1)[0]]


def test_a_page_is_saved_before_it_is_given_out_and_restored_before_it_is_read(driver):
    chunks = [Chunk(2, 0, (1,), (3,), False), Chunk(3, 8, TOKENS[8:], (10,), True)]
    starts = [start(2), start(3, pages=(5, 9))]
    assert driver.step(chunks, starts, copies=[SAVE, RESTORE]) == [
        fake_continuation("aa", TOKENS, 1)[0]
    ]


def test_a_fork_draws_what_it_would_draw_alone(driver):
    driver.step([Chunk(2, 0, TOKENS[:11], (0, 1, 2), True)], [start(2)])
    # The first goes on in its own page while the second starts in a copy of it.
    sampling = SamplingParams(seed=7)
    sampled = driver.step(
        [Chunk(2, 11, (99,), (), True), Chunk(3, 10, TOKENS[10:11], (), True)],
        [start(3, pages=(0, 1, 9), sampling=sampling, num_cached_tokens=10)],
        copies=[PageCopy("fork", 2, 9, 2)],
    )
    assert sampled == [
        fake_continuation("aa", (*TOKENS[:11], 99), 1)[0],
        fake_continuation("aa", TOKENS[:11], 1, seed=7)[0],
    ]


@pytest.mark.parametrize(
    ("copy", "complaint"),
    [
        (PageCopy("save", 7, 1, 4), "never computed"),
        (PageCopy("save", 3, 1, 3), "only forks copy in part"),
        (PageCopy("save", 3, 4, 4), "no host page 4"),
        (PageCopy("save", 16, 1, 4), "no page 16"),
        (PageCopy("restore", 1, 9, 4), "never computed"),
        (PageCopy("restore", 4, 9, 4), "no host page 4"),
        (PageCopy("fork", 7, 9, 1), "never computed"),
        (PageCopy("fork", 3, 9, 5), "no such size"),
        (PageCopy("fork", 3, 9, 0), "no such size"),
        (PageCopy("fork", 3, 3, 1), "copied to itself"),
        (PageCopy("fork", 3, 5, 1), "a sequence holds it"),
    ],
)
def test_a_copy_of_nothing_or_over_something_is_noticed(driver, copy, complaint):
    driver.step(starts=[start(2, pages=(5,))])
    with pytest.raises(AssertionError, match=complaint):
        driver.step(copies=[copy])


def test_a_save_of_a_page_that_is_half_computed_is_noticed(driver):
    driver.step([Chunk(2, 0, TOKENS[:2], (0,), False)], [start(2)])
    with pytest.raises(AssertionError, match="never computed"):
        driver.step(copies=[PageCopy("save", 0, 0, 4)])


def test_a_host_page_that_was_saved_over_is_noticed(driver):
    driver.step(copies=[SAVE])
    driver.step(copies=[PageCopy("save", 8, 1, 4)])
    with pytest.raises(AssertionError, match="page 9 offset 0 is of another prefix"):
        driver.step(starts=[start(3, pages=(5, 9))], copies=[RESTORE])


def test_a_page_restored_for_another_adapter_is_noticed(driver):
    driver.step(copies=[PageCopy("save", 5, 0, 4)])
    copies = [PageCopy("restore", 0, 9, 4)]
    with pytest.raises(AssertionError, match="page 9 offset 0 is of another prefix or adapter"):
        driver.step(starts=[start(3, slot=1, pages=(9,))], copies=copies)


@pytest.mark.parametrize(
    ("copies", "complaint"),
    [
        ([], "page 9, which was not forked for it"),
        ([PageCopy("fork", 8, 9, 3)], "page 9, which was not forked for it"),
        ([PageCopy("fork", 8, 9, 2), RESTORE], "page 9, which was not forked for it"),
        ([PageCopy("fork", 3, 9, 2)], "page 9 offset 0 is of another prefix"),
    ],
)
def test_a_sequence_that_starts_within_a_page_needs_the_right_fork(driver, copies, complaint):
    driver.step(copies=[SAVE])
    with pytest.raises(AssertionError, match=complaint):
        driver.step(starts=[start(2, pages=(5, 3, 9), num_cached_tokens=10)], copies=copies)


def test_a_fork_for_two_is_noticed(driver):
    starts = [start(i, pages=(5, 3, 9), num_cached_tokens=10) for i in (2, 3)]
    with pytest.raises(AssertionError, match="sequence 3 .* which another one has"):
        driver.step(starts=starts, copies=[PageCopy("fork", 8, 9, 2)])


def test_a_fork_given_out_in_its_own_plan_is_noticed(driver):
    starts = [start(2, pages=(5, 3, 9), num_cached_tokens=10), start(3)]
    copies = [PageCopy("fork", 8, 9, 2)]
    with pytest.raises(AssertionError, match="page 9 is given out while a sequence holds it"):
        driver.step([Chunk(3, 0, (1,), (9,), False)], starts, copies=copies)
