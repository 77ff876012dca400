"""A step planned while the one before it runs: what is left open, and who is computed in vain."""

from collections.abc import Callable

import pytest

from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from worker.protocol import PENDING_TOKEN
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


def assert_nothing_held(engine: FakeEngine) -> None:
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.held_pages) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages


def test_a_token_that_is_being_drawn_is_left_to_the_ranks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(6), 5)
    engine.begin_step()
    ahead = engine.begin_step()
    assert ahead is not None
    (chunk,) = ahead.chunks
    assert (chunk.start, chunk.token_ids, chunk.samples) == (6, (PENDING_TOKEN,), True)
    engine.run()
    assert engine.tokens(1) == fake_continuation(None, prompt(6), 5)
    assert_nothing_held(engine)


def test_planned_ahead_or_not_the_answers_are_the_same() -> None:
    engines = [FakeEngine(tiny_config(), plans_ahead=ahead) for ahead in (False, True)]
    for engine in engines:
        for number in range(12):
            engine.add(prompt(3 + 5 * number), 9, ("base", "A", "B", "C")[number % 4])
        engine.run()
    assert [engines[0].tokens(i) for i in range(1, 13)] == [
        engines[1].tokens(i) for i in range(1, 13)
    ]
    assert any(
        PENDING_TOKEN in chunk.token_ids for plan in engines[1].plans for chunk in plan.chunks
    )


def test_one_that_stops_is_computed_once_more_and_told_once(make_engine: MakeEngine) -> None:
    tokens = fake_continuation(None, prompt(6), 9)
    engine = make_engine()
    engine.add(prompt(6), 9, stop_token_ids=(tokens[1],))
    engine.begin_step()
    engine.begin_step()
    engine.end_step()
    engine.begin_step()  # the third step computes what the second is about to end
    engine.end_step()
    assert engine.tokens(1) == tokens[:2] and engine.finish_reason(1) == "stop"
    assert engine.scheduler.stats().held_pages > 0  # the ranks write there
    assert engine.begin_step() is None
    engine.end_step()
    assert len(engine.events[1]) == 2
    assert_nothing_held(engine)


def test_one_that_reaches_its_length_is_not_computed_in_vain(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(6), 2)
    engine.begin_step()
    assert engine.begin_step() is not None
    engine.end_step()
    assert engine.begin_step() is None
    engine.end_step()
    assert engine.finish_reason(1) == "length"
    assert [len(plan.chunks) for plan in engine.plans] == [1, 1]


def test_a_long_prompt_goes_on_and_a_newcomer_starts_while_a_step_runs(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(token_budget=16, max_chunk=8)
    engine.add(prompt(20), 3)
    engine.begin_step()
    engine.add(prompt(5, salt=1), 3)
    ahead = engine.begin_step()
    assert ahead is not None
    assert [(chunk.seq_id, chunk.start) for chunk in ahead.chunks] == [(1, 8), (2, 0)]
    engine.run()
    assert engine.tokens(1) == fake_continuation(None, prompt(20), 3)
    assert engine.tokens(2) == fake_continuation(None, prompt(5, salt=1), 3)


def test_nobody_is_planned_ahead_where_one_may_have_to_give_way(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=6, prefix_cache=False, max_running=2, token_budget=16)
    engine.add(prompt(7), 7)
    engine.add(prompt(7, salt=1), 7)
    engine.begin_step()
    for _ in range(4):
        assert engine.begin_step() is not None
        engine.end_step()
    assert engine.begin_step() is not None  # positions 12 to 15 take a fourth page of each
    engine.end_step()
    assert engine.begin_step() is None
    assert engine.scheduler.stats().counters.preemptions == 0
    engine.run()
    assert engine.scheduler.stats().counters.preemptions > 0
    assert engine.tokens(2) == fake_continuation(None, prompt(7, salt=1), 7)
    assert_nothing_held(engine)


def test_while_a_slot_is_drained_nobody_is_planned_ahead(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, slot_patience=2)
    engine.add(prompt(3), 60, "A")
    engine.add(prompt(3), 3, "B")
    for _ in range(4):
        engine.step()
    assert engine.begin_step() is not None
    assert engine.begin_step() is None
    engine.run()
    assert engine.tokens(2) == fake_continuation("B", prompt(3), 3)


@pytest.mark.parametrize("how", ["abort", "expire", "spoil"])
def test_one_that_ends_with_two_steps_under_way_is_held_until_both_are_done(
    make_engine: MakeEngine, how: str
) -> None:
    engine = make_engine()
    engine.add(prompt(6), 9)
    engine.step()
    if how == "spoil":
        engine.spoil(1)
    engine.begin_step()
    engine.begin_step()
    if how != "spoil":
        getattr(engine, how)(1)
    engine.end_step()
    num_told = len(engine.events[1])
    assert num_told == (1 if how == "abort" else 2)
    assert engine.scheduler.stats().held_pages > 0
    assert engine.begin_step() is None
    engine.end_step()
    assert len(engine.events[1]) == num_told
    assert_nothing_held(engine)


def test_pages_whose_last_token_nobody_was_told_are_not_kept(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(7), 9)
    engine.begin_step()
    engine.begin_step()  # computes position 7, the last of its page, from a token that is dropped
    engine.abort(1)
    engine.end_step()
    engine.end_step()
    assert_nothing_held(engine)
    assert engine.scheduler.stats().cached_pages == 1


def test_a_prompt_that_was_aborted_is_not_computed_on(make_engine: MakeEngine) -> None:
    engine = make_engine(token_budget=16, max_chunk=8)
    engine.add(prompt(100), 3)
    engine.begin_step()
    engine.begin_step()
    engine.abort(1)
    engine.end_step()
    assert engine.begin_step() is None
    engine.end_step()
    assert_nothing_held(engine)


def test_a_slot_is_loaded_anew_only_when_no_step_under_way_uses_it(
    make_engine: MakeEngine,
) -> None:
    tokens = fake_continuation("A", prompt(3), 9)
    engine = FakeEngine(tiny_config(num_slots=1), loads_at_once=False, runs_late=True)
    engine.add(prompt(3), 9, "A", stop_token_ids=(tokens[0],))
    engine.begin_step()
    engine.finish_load()
    engine.add(prompt(3), 3, "B")
    engine.begin_step()
    engine.begin_step()
    engine.end_step()
    assert engine.finish_reason(1) == "stop"
    engine.begin_step()
    assert not engine.loads  # step 2 still computes A
    while engine.num_in_flight:
        engine.end_step()
    assert engine.begin_step() is not None  # it says that A's sequence has left
    assert not engine.loads
    engine.end_step()
    engine.begin_step()
    assert engine.finish_load() == "B"
    engine.run()
    assert engine.tokens(2) == fake_continuation("B", prompt(3), 3)
