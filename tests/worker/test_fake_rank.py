"""The fake answers like a rank and catches plans that would corrupt a real one."""

import pytest

from worker.fake_rank import FakeRank, fake_continuation
from worker.protocol import GENESIS, Chunk, Plan, SamplingParams, SequenceStart, encode_plan

TOKENS = tuple(range(10, 22))  # three pages of 4


class Driver:
    """Numbers and sends plans to one fake rank."""

    def __init__(self) -> None:
        self.rank = FakeRank(page_size=4, num_slots=2)
        self.rank.allocate(16)
        self.rank.load_adapter(0, "aa")
        self.rank.load_adapter(1, "bb")
        self._digest = GENESIS
        self._step = 0

    def step(self, chunks=(), starts=(), ends=()):
        self._step += 1
        plan = Plan(self._step, tuple(ends), tuple(starts), tuple(chunks))
        frame, self._digest = encode_plan(plan, self._digest)
        output = self.rank.step(frame).output
        return [token.token_id for token in output.tokens]


def start(seq_id, slot=0, pages=(), sampling=None, history=()):
    sampling = sampling or SamplingParams()
    return SequenceStart(seq_id, slot, sampling, 12, pages, 4 * len(pages), history)


@pytest.fixture
def driver():
    """Return a driver whose pages 5, 3, 8 hold TOKENS of slot 0, computed by a sequence gone."""
    driver = Driver()
    driver.step([Chunk(1, 0, TOKENS, (5, 3, 8), True)], [start(1)])
    driver.step(ends=[1])
    return driver


def test_tokens_depend_on_adapter_prompt_and_seed_only():
    driver = Driver()
    drawn = []
    for seq_id, slot, first, seed in ((1, 0, 0, 0), (2, 0, 6, 0), (3, 1, 0, 0), (4, None, 0, 9)):
        starts = [start(seq_id, slot, sampling=SamplingParams(seed=seed))]
        pages = tuple(range(3 * (seq_id - 1), 3 * seq_id))
        if first:
            driver.step([Chunk(seq_id, 0, TOKENS[:first], pages[:2], False)], starts)
            starts, pages = [], pages[2:]
        drawn += driver.step([Chunk(seq_id, first, TOKENS[first:], pages, True)], starts)
    assert drawn[0] == drawn[1] == fake_continuation("aa", TOKENS, 1)[0]
    assert drawn[2] == fake_continuation("bb", TOKENS, 1)[0] != drawn[0]
    assert drawn[3] == fake_continuation(None, TOKENS, 1, seed=9)[0] != drawn[0]


def test_decoding_continues_what_was_drawn(driver):
    drawn = driver.step([Chunk(2, 0, TOKENS, (0, 1, 2), True)], [start(2)])
    drawn += driver.step([Chunk(2, 12, (drawn[0],), (9,), True)])
    assert tuple(drawn) == fake_continuation("aa", TOKENS, 2)


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
