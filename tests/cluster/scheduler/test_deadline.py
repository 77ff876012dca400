"""Deadlines: the one way in which time enters, and what a sequence leaves that is out of it."""

from collections.abc import Callable

import pytest

from cluster.errors import BY_NAME, ErrorInfo, NotFound
from cluster.request import BASE
from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]

PROMPT = tuple(range(13))


def assert_told_once(engine: FakeEngine, seq_id: int) -> None:
    """The last event, and no other, says that the deadline has passed."""
    *before, last = engine.events[seq_id]
    assert (last.token_ids, last.finish_reason) == ((), "error")
    assert last.error is not None and BY_NAME[last.error.name].status == 504
    assert all(event.finish_reason is None for event in before)


def assert_nothing_held(engine: FakeEngine) -> None:
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.held_pages) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages
    assert all(slot.leases == 0 for slot in stats.slots)


def test_the_event_names_the_request_and_the_reason(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT)
    ((seq_id, event),) = engine.scheduler.expire(1)
    assert (seq_id, event.request_id, event.finish_reason) == (1, "r1", "error")
    assert event.error is not None
    assert event.error.name == "DeadlineExceeded"
    assert "longer than it may" in event.error.message


def test_one_that_waits_ends_and_the_others_go_on(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    for salt in range(3):
        engine.add((salt, *PROMPT), 3)
    engine.step()
    engine.expire(2)
    assert_told_once(engine, 2)
    assert engine.scheduler.stats().num_waiting == 1
    engine.run()
    assert [engine.finish_reason(seq_id) for seq_id in (1, 3)] == ["length", "length"]
    assert len(engine.events[2]) == 1
    assert_nothing_held(engine)


def test_one_that_runs_ends_at_once_and_its_pages_stay_for_others(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, 50, "A")
    for _ in range(4):
        engine.step()
    engine.expire(1)
    assert_told_once(engine, 1)
    assert_nothing_held(engine)
    sent = engine.tokens(1)
    assert sent == fake_continuation("A", PROMPT, 50)[: len(sent)] and len(sent) == 3
    engine.add(PROMPT, 2, "A")
    engine.run()
    assert engine.num_cached_tokens(2) == 12
    assert len(engine.events[1]) == 4
    assert [end for plan in engine.plans for end in plan.ends] == [1]


@pytest.mark.parametrize("max_tokens", [1, 50])
def test_one_whose_step_is_under_way_says_so_now_and_lets_go_at_the_commit(
    make_engine: MakeEngine, max_tokens: int
) -> None:
    engine = make_engine()
    engine.add(PROMPT, max_tokens)
    engine.begin_step()
    held = engine.scheduler.stats().held_pages
    engine.expire(1)
    assert_told_once(engine, 1)
    assert engine.scheduler.stats().held_pages == held > 0  # the ranks write there
    engine.end_step()
    assert len(engine.events[1]) == 1  # the token that was drawn is nobody's any more
    assert_nothing_held(engine)


def test_one_whose_logits_fail_in_the_step_under_way_is_told_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, 5)
    engine.spoil(1)
    engine.begin_step()
    engine.expire(1)
    engine.end_step()
    assert_told_once(engine, 1)
    assert_nothing_held(engine)


@pytest.mark.parametrize("in_flight", [False, True])
def test_of_an_abort_and_a_deadline_the_first_counts(
    make_engine: MakeEngine, in_flight: bool
) -> None:
    engine = make_engine()
    engine.add(PROMPT, 50)
    engine.add(PROMPT, 50)
    engine.step()
    if in_flight:
        engine.begin_step()
    engine.abort(1)
    assert engine.scheduler.expire(1) == []
    engine.expire(2)
    engine.abort(2)
    assert engine.scheduler.expire(2) == []
    if in_flight:
        engine.end_step()
    assert len(engine.events[1]) == 1  # the token from before
    assert_told_once(engine, 2)
    assert_nothing_held(engine)


def test_one_that_has_ended_or_never_was_is_ignored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, 2)
    engine.run()
    for seq_id in (1, 2, 0, 99):
        assert engine.scheduler.expire(seq_id) == []
    assert engine.finish_reason(1) == "length"


def test_one_that_was_preempted_keeps_what_it_was_sent(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=9)
    engine.add(PROMPT[:8], 24)
    engine.add(PROMPT[1:9], 20)
    while not engine.scheduler.stats().counters.preemptions:
        engine.step()
    sent = engine.tokens(2)
    engine.expire(2)
    assert_told_once(engine, 2)
    engine.run()
    assert engine.tokens(2) == sent != ()
    assert engine.tokens(1) == fake_continuation(None, PROMPT[:8], 24)
    assert_nothing_held(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_the_first_choice_may_run_out_of_time_and_the_others_go_on(
    make_engine: MakeEngine, num_steps: int
) -> None:
    engine = make_engine(max_chunk=8, token_budget=16)
    ids = engine.add_choices(PROMPT, 3, max_tokens=6)
    for _ in range(num_steps):
        engine.step()
    engine.expire(ids[0])
    assert_told_once(engine, ids[0])
    engine.run()
    for seed in (1, 2):
        assert engine.tokens(ids[seed]) == fake_continuation(None, PROMPT, 6, seed=seed)
    assert_nothing_held(engine)


def test_a_choice_that_is_held_may_run_out_of_time(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = engine.add_choices(PROMPT, 3, max_tokens=6, adapter="A")
    for seq_id in (ids[1], ids[2]):
        engine.expire(seq_id)
        assert_told_once(engine, seq_id)
    engine.run()
    assert engine.tokens(ids[0]) == fake_continuation("A", PROMPT, 6)
    assert len(engine.events[ids[1]]) == len(engine.events[ids[2]]) == 1
    assert_nothing_held(engine)


def test_one_that_waits_for_its_adapter_ends_and_the_load_is_still_answered(
    make_engine: MakeEngine,
) -> None:
    for is_loaded in (True, False):
        engine = make_engine(loads_at_once=False, num_slots=1)
        engine.add(PROMPT, 2, "A")
        engine.step()
        engine.expire(1)
        assert_told_once(engine, 1)
        if is_loaded:
            engine.finish_load()
        else:
            engine.fail_load(ErrorInfo("NotFound", "gone"))
        assert len(engine.events[1]) == 1
        engine.add(PROMPT, 2, "B")
        engine.step()
        assert engine.finish_load() == "B"
        engine.run()
        assert engine.tokens(2) == fake_continuation("B", PROMPT, 2)
        assert_nothing_held(engine)


def test_a_slot_is_not_drained_for_one_that_has_run_out_of_time(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, slot_patience=4, drain_steps=10)
    engine.add(PROMPT, 1, BASE)
    engine.add(PROMPT, 40, "A")
    engine.step()
    engine.step()
    engine.add(PROMPT, 1, "B")
    for _ in range(8):  # long enough that A's slot is being drained
        engine.step()
    late = engine.add(PROMPT, 1, "A")
    engine.step()
    assert engine.finish_reason(late) is None
    engine.expire(3)
    engine.step()
    assert engine.finish_reason(late) == "length"
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.counters.preemptions, stats.counters.adapter_loads) == (0, 1)


def test_an_unload_that_waits_for_a_sequence_is_complete_when_its_time_is_out(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.add(PROMPT, 50, "A")
    engine.step()
    engine.step()
    waiting = engine.add(PROMPT, 50, "A")
    engine.unload("A")
    with pytest.raises(NotFound):
        engine.add(PROMPT, 1, "A")
    engine.expire(1)
    engine.expire(waiting)
    engine.run()
    assert [(gone.digest, gone.freed_slots) for gone in engine.unloaded] == [("A", ((0, "A"),))]
    assert engine.scheduler.stats().free_pages == 64
