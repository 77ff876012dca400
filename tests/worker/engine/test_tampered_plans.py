"""A plan that is not the next one stops every rank before its first collective.

Real ranks over the real transport between processes. Its own time-out is a minute, so an answer
within the tests' limits shows that the ranks have left their group, not that they have waited.
"""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE
from tests.worker.group import GREEDY, RankGroup, join_in_threads, random_tokens
from worker.distributed.communicator import Communicator
from worker.errors import GroupBroken, PlanMismatch
from worker.pools import PageCounts
from worker.protocol import (
    DIGEST_BYTES,
    GENESIS,
    Chunk,
    Plan,
    SamplingParams,
    SequenceStart,
    encode_plan,
)
from worker.testing.fake_rank import FakeRank

TP = 3
PROMPT = random_tokens(20, 1)


class CountingPlace:
    """A place in a group that counts the collectives its rank begins."""

    def __init__(self, place: Communicator) -> None:
        self.rank, self.size = place.rank, place.size
        self.num_begun = 0
        self._place = place

    def all_reduce(self, x):
        self.num_begun += 1
        return self._place.all_reduce(x)

    def gather_first(self, x, widths):
        self.num_begun += 1
        return self._place.gather_first(x, widths)

    def close(self):
        self._place.close()


@pytest.fixture
def places() -> Iterator[list[CountingPlace]]:
    """Return the places of ranks that are joined by sockets."""
    places = [CountingPlace(place) for place in join_in_threads(TP, timeout=PATIENCE)]
    yield places
    for place in places:
        place.close()


@pytest.fixture
def group(tiny_model, places) -> Iterator[RankGroup]:
    """Return ranks of which sequence 1 has been through two steps: a prefill and a decode."""
    group = RankGroup(tiny_model("llama").path, tp=TP, places=places)
    start = SequenceStart(1, None, GREEDY, len(PROMPT), (), 0, ())
    assert results(group, [decode_frame(group, 0, PROMPT, (3, 7), (start,))] * TP) == [None] * TP
    assert results(group, [decode_frame(group, 20, (5,))] * TP) == [None] * TP
    yield group
    group.close()


def decode_frame(group, at, tokens, new_pages=(), starts=()):
    return group.frame([Chunk(1, at, tokens, new_pages, True)], starts)


def results(group: RankGroup, frames: list[bytes]) -> list[BaseException | None]:
    """Give each rank its frame and return what each failed with, None for success."""
    return [future.exception(timeout=PATIENCE) for future in group.send(frames)]


def flip(frame: bytes, bit: int) -> bytes:
    changed = bytearray(frame)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# What arrives instead of the right plan, given the one before it, itself, and the one after it.
TAMPERS: dict[str, Callable[[bytes, bytes, bytes], bytes]] = {
    "first bit of the digest": lambda last, right, next_: flip(right, 0),
    "last bit of the digest": lambda last, right, next_: flip(right, 8 * DIGEST_BYTES - 1),
    "a bit of the step": lambda last, right, next_: flip(right, 8 * (DIGEST_BYTES + 1)),
    "last bit of the body": lambda last, right, next_: flip(right, 8 * len(right) - 1),
    "cut short": lambda last, right, next_: right[:-1],
    "repeated": lambda last, right, next_: last,
    "lost": lambda last, right, next_: next_,
}


@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("tamper", TAMPERS.values(), ids=TAMPERS)
def test_a_wrong_plan_is_refused_and_no_rank_hangs(group, places, tamper, victims):
    last = decode_frame(group, 21, (6,))
    assert results(group, [last] * TP) == [None] * TP
    right, next_ = decode_frame(group, 22, (7,)), decode_frame(group, 23, (8,))
    wrong = tamper(last, right, next_)
    begun = [place.num_begun for place in places]
    errors = results(group, [wrong if rank in victims else right for rank in range(TP)])
    for rank, error in enumerate(errors):
        if rank in victims:
            assert isinstance(error, PlanMismatch)
            assert error.step == 4
            assert places[rank].num_begun == begun[rank]
        else:
            assert isinstance(error, GroupBroken)


def test_plans_in_the_wrong_order_are_refused_both(group, places):
    first, second = decode_frame(group, 21, (6,)), decode_frame(group, 22, (7,))
    begun = [place.num_begun for place in places]
    for error in results(group, [second] * TP):
        assert isinstance(error, PlanMismatch)
    assert [place.num_begun for place in places] == begun
    # The right one comes too late: the ranks have left their group.
    for error in results(group, [first] * TP):
        assert isinstance(error, GroupBroken)


def test_a_rank_that_breaks_a_rule_alone_frees_the_others(group, places):
    group.ranks[1]._table._num_pages["full"] = 8  # as if it had been told another number of pages
    frame = decode_frame(group, 21, tuple(range(20)), (9,))
    errors = results(group, [frame] * TP)
    assert isinstance(errors[1], AssertionError)
    assert isinstance(errors[0], GroupBroken)
    assert isinstance(errors[2], GroupBroken)


def small_plan(step: int, starts: bool) -> Plan:
    start = SequenceStart(1, None, SamplingParams(), 2, (), 0, ())
    chunk = Chunk(1, 0, (5, 6), (2,), True) if starts else Chunk(1, step, (step,), (), True)
    return Plan(step, (), (start,) if starts else (), (chunk,))


@settings(deadline=None)
@given(st.data())
def test_a_changed_bit_in_one_plan_is_caught_by_every_rank_that_gets_it(data):
    ranks = [FakeRank(page_size=16) for _ in range(TP)]
    for rank in ranks:
        rank.allocate(PageCounts(4))
    digest = GENESIS
    bad_step = data.draw(st.integers(1, 6), label="step")
    victims = data.draw(st.sets(st.integers(0, TP - 1), min_size=1), label="victims")
    for step in range(1, bad_step + 1):
        frame, digest = encode_plan(small_plan(step, step == 1), digest)
        if step < bad_step:
            outputs = [rank.step(frame).output for rank in ranks]
            assert outputs == [outputs[0]] * TP
    bit = data.draw(st.integers(0, 8 * len(frame) - 1), label="bit")
    for index, rank in enumerate(ranks):
        if index in victims:
            with pytest.raises(PlanMismatch) as refusal:
                rank.step(flip(frame, bit))
            assert refusal.value.step == bad_step
        else:
            assert rank.step(frame).step == bad_step
