"""Who has waited longer for a slot than the bound said when it came is counted."""

from collections.abc import Callable
from itertools import count

from cluster.request import BASE
from cluster.scheduler.replay.state import decode_state, encode_state
from cluster.scheduler.testing.fake_engine import FakeEngine

MakeEngine = Callable[..., FakeEngine]

_salts = count()


def prompt() -> tuple[int, ...]:
    salt = next(_salts)
    return tuple(salt * 1000 + i for i in range(5))


def step_while_loading(engine: FakeEngine, num_steps: int) -> None:
    """Make steps, which the base model runs in."""
    for _ in range(num_steps):
        if engine.scheduler.stats().num_running == 0:
            engine.add(prompt(), 10, BASE)
        engine.step()


def finish(engine: FakeEngine) -> None:
    """Let all loads end at once from here on, and all requests."""
    while not engine.is_idle:
        while engine.loads:
            engine.finish_load()
        engine.step()


def test_who_waited_for_a_load_that_was_slower_than_any_before_got_its_slot_late(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=1, loads_at_once=False)
    engine.add(prompt(), 1, "A")
    bound = engine.scheduler.stats().slot_wait_bound
    engine.add(prompt(), 1, "B")
    step_while_loading(engine, bound + 1)
    assert engine.scheduler.stats().counters.late_slots == 0  # B still waits
    finish(engine)
    stats = engine.scheduler.stats()
    assert stats.longest_slot_wait > bound
    assert stats.counters.late_slots == 1
    restored = decode_state(encode_state(engine.scheduler))
    assert restored.stats().counters.late_slots == 1


def test_who_came_when_loads_were_known_to_be_slow_did_not(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, loads_at_once=False)
    early = engine.scheduler.stats().slot_wait_bound
    engine.add(prompt(), 1, "A")
    step_while_loading(engine, early + 1)
    finish(engine)
    engine.add(prompt(), 1, "B")
    engine.step()
    engine.add(prompt(), 1, "C")
    step_while_loading(engine, early + 1)
    finish(engine)
    stats = engine.scheduler.stats()
    assert stats.longest_slot_wait > early
    assert stats.counters.late_slots == 0


def test_another_request_for_an_adapter_in_line_does_not_set_it_back(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=1, loads_at_once=False)
    engine.add(prompt(), 1, "A")
    bound = engine.scheduler.stats().slot_wait_bound
    engine.add(prompt(), 1, "B")
    step_while_loading(engine, bound + 1)
    engine.add(prompt(), 1, "B")
    finish(engine)
    stats = engine.scheduler.stats()
    assert stats.longest_slot_wait > bound
    assert stats.counters.late_slots == 1


def test_the_bound_counts_for_who_comes_back_to_the_line_as_it_is_then(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=1, loads_at_once=False)
    engine.add(prompt(), 1, "A")
    bound = engine.scheduler.stats().slot_wait_bound
    left = engine.add(prompt(), 1, "B")
    step_while_loading(engine, bound + 1)
    engine.abort(left)
    engine.add(prompt(), 1, "B")
    finish(engine)
    assert engine.scheduler.stats().counters.late_slots == 0
