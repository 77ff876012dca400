"""How sequences end: aborts, failures, and what is given back."""

from collections.abc import Callable

from cluster.request import BASE, Request
from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.protocol import SampledToken, SamplingParams, StepOutput

MakeEngine = Callable[..., FakeEngine]


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


def assert_all_pages_back(engine: FakeEngine) -> None:
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.held_pages) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages


def test_an_abort_in_mid_prefill_restores_the_pool(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(100), 5)
    engine.step()
    engine.abort(1)
    assert_all_pages_back(engine)
    assert engine.events[1] == []
    engine.add(prompt(100), 5)
    engine.run()
    assert engine.num_cached_tokens(2) == 32  # what was computed is not lost
    assert 1 in engine.plans[1].ends


def test_pages_of_an_abort_are_not_free_before_the_step_in_flight_is_committed(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.add(prompt(10), 5)
    engine.begin_step()
    engine.abort(1)
    engine.abort(1)
    assert engine.scheduler.stats().held_pages == 3
    engine.end_step()
    assert_all_pages_back(engine)
    assert engine.events[1] == []


def test_aborts_of_waiting_ended_and_unknown_sequences_leave_no_trace(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.add(prompt(3), 1)
    engine.add(prompt(3), 1, "A")
    engine.abort(2)
    engine.run()
    for seq_id in (1, 2, 99):
        engine.abort(seq_id)
    assert_all_pages_back(engine)
    assert engine.finish_reason(1) == "length"
    assert engine.events[2] == []


def test_non_finite_logits_end_only_their_own_sequence(make_engine: MakeEngine) -> None:
    scheduler = make_engine().scheduler
    for name in "xy":
        scheduler.add(Request(name, BASE, prompt(9), SamplingParams(), 5))
    assert scheduler.schedule() is not None
    events = scheduler.commit(StepOutput(1, (SampledToken(2, 7),), failed=(1,)))
    scheduler.check()
    (failed_id, failed), (other_id, other) = events
    assert (failed_id, failed.finish_reason, failed.token_ids) == (1, "error", ())
    assert failed.error is not None and failed.error.name == "Internal"
    assert (other_id, other.token_ids, other.finish_reason) == (2, (7,), None)


def test_what_a_failed_sequence_computed_is_not_offered_to_others(make_engine: MakeEngine) -> None:
    scheduler = make_engine().scheduler
    scheduler.add(Request("x", BASE, prompt(9), SamplingParams(), 5))
    assert scheduler.schedule() is not None
    scheduler.commit(StepOutput(1, (), failed=(1,)))
    assert scheduler.stats().free_pages == 64
