"""Who goes first and who gives way: the smaller number first, then the first to arrive."""

from collections.abc import Callable
from itertools import permutations

import pytest

from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.protocol import Plan
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]


def prompt(salt: int, length: int = 5) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


def starts_of(engine: FakeEngine) -> list[int]:
    return [start.seq_id for plan in engine.plans for start in plan.starts]


def victims_in(plan: Plan | None, engine: FakeEngine) -> list[int]:
    """Return who was sent back; the others that have ended had their last event before."""
    return [end for end in plan.ends if engine.finish_reason(end) is None] if plan else []


def test_the_smallest_number_is_admitted_first_and_among_equals_the_first_to_arrive(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_running=1)
    for salt, priority in enumerate((0, 3, -2, 3, 0, -2)):
        engine.add(prompt(salt), 2, priority=priority)
    engine.run()
    assert starts_of(engine) == [3, 6, 1, 5, 2, 4]


def test_who_arrives_late_with_a_higher_priority_is_the_next_to_be_admitted(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_running=1)
    for salt in range(3):
        engine.add(prompt(salt), 4)
    engine.step()
    engine.add(prompt(9), 4, priority=-1)
    engine.run()
    assert starts_of(engine) == [1, 4, 2, 3]  # and who runs is not stopped for it


def test_the_order_of_arrival_does_not_matter_between_priorities(make_engine: MakeEngine) -> None:
    for order in permutations((-1, 0, 7)):
        engine = make_engine(max_running=1, fairness=True)
        for priority in order:
            engine.add(prompt(priority), 2, priority=priority, tenant=str(priority))
        engine.run()
        assert [order[seq_id - 1] for seq_id in starts_of(engine)] == [-1, 0, 7]


def test_no_debt_of_a_tenant_lets_a_lower_priority_pass(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1, fairness=True)
    urgent = [engine.add(prompt(salt), 30, tenant="busy") for salt in range(4)]
    patient = engine.add(prompt(9), 1, tenant="quiet", priority=1)
    engine.run()
    assert starts_of(engine) == [*urgent, patient]


def test_a_request_that_does_not_fit_is_not_overtaken_by_a_lower_priority(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_pages=8, max_model_len=32)
    engine.add(prompt(1, 12), 12)
    engine.step()
    engine.add(prompt(2), 1, priority=1)
    engine.add(prompt(3, 20), 1, priority=0)
    engine.run()
    assert starts_of(engine) == [1, 3, 2]


def test_the_lowest_priority_gives_way_even_if_it_came_first(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10)
    engine.add(prompt(1), 24, priority=5)
    engine.step()
    engine.add(prompt(2), 24)
    victims = []
    while not engine.is_idle:
        victims += victims_in(engine.step(), engine)
    assert victims and set(victims) == {1}
    for seq_id in (1, 2):
        assert engine.tokens(seq_id) == fake_continuation(None, prompt(seq_id), 24)


def test_among_equals_the_last_to_arrive_gives_way(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=11)
    for salt, priority in ((1, 2), (2, 2), (3, 0)):
        engine.add(prompt(salt), 24, priority=priority)
    victims: list[int] = []
    while len(victims) < 2:
        victims += victims_in(engine.step(), engine)
    assert victims == [2, 1]


def test_a_prefill_of_low_priority_gives_way_to_a_decode_and_a_decode_to_a_prefill(
    make_engine: MakeEngine,
) -> None:
    for low in (1, 2):
        engine = make_engine(num_pages=12, max_running=2, token_budget=6, max_model_len=44)
        engine.add(prompt(1, 2), 30, priority=low == 1)
        engine.add(prompt(2, 40), 1, priority=low == 2)
        victims = []
        while not engine.is_idle:
            victims += victims_in(engine.step(), engine)
        assert victims and set(victims) == {low}
        assert engine.tokens(1) == fake_continuation(None, prompt(1, 2), 30)
        assert engine.tokens(2) == fake_continuation(None, prompt(2, 40), 1)


def test_who_gave_way_returns_behind_higher_and_before_later_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=9, max_running=2)
    engine.add(prompt(1, 8), 24)
    engine.add(prompt(2, 8), 20, priority=1)
    while not engine.scheduler.stats().counters.preemptions:
        engine.step()
    engine.add(prompt(3), 1, priority=1)
    engine.add(prompt(4), 1, priority=0)
    num_before = len(starts_of(engine))
    engine.run()
    order = starts_of(engine)[num_before:]
    assert order.index(4) < order.index(2) < order.index(3)


def _unserved_in_the_only_slot(engine: FakeEngine, priority: int) -> None:
    """Give adapter A the slot while no page is left for its request."""
    engine.add(prompt(1, 12), 16, priority=-9)
    engine.step()
    engine.add(prompt(2, 16), 1, "A", priority=priority)
    engine.step()
    engine.step()  # from here on it could have started
    assert [slot.adapter for slot in engine.scheduler.stats().slots] == ["A"]


@pytest.mark.parametrize(("ours", "theirs", "holder"), [(5, 0, "B"), (5, 5, "A"), (0, 5, "A")])
def test_a_slot_that_has_had_no_turn_goes_to_a_higher_priority_and_to_no_other(
    make_engine: MakeEngine, ours: int, theirs: int, holder: str
) -> None:
    engine = make_engine(num_pages=8, num_slots=1, max_model_len=32, slot_patience=6)
    _unserved_in_the_only_slot(engine, ours)
    engine.add(prompt(3, 16), 2, "B", priority=theirs)
    engine.step()
    assert [slot.adapter for slot in engine.scheduler.stats().slots] == ["A"]  # for its patience
    for _ in range(6):
        engine.step()
    assert [slot.adapter for slot in engine.scheduler.stats().slots] == [holder]
    engine.run()
    assert engine.tokens(2) == fake_continuation("A", prompt(2, 16), 1)
    assert engine.tokens(3) == fake_continuation("B", prompt(3, 16), 2)
    assert starts_of(engine)[1:] == ([3, 2] if holder == "B" else [2, 3])
    assert engine.scheduler.stats().counters.adapter_loads == (3 if holder == "B" else 2)


def test_a_slot_in_its_turn_is_not_taken_by_a_higher_priority(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, slot_patience=20, max_running=1)
    engine.add(prompt(1), 3, "A", priority=5)
    engine.step()
    engine.step()
    engine.add(prompt(2), 3, "A", priority=5)
    engine.add(prompt(3), 1, "B", priority=0)
    engine.run()
    assert starts_of(engine) == [1, 2, 3]
    assert engine.scheduler.stats().counters.adapter_loads == 2


def _drained_for(engine: FakeEngine, priority: int) -> None:
    """Let A's slot, not B's, be drained for C: A came first, but B's priority is higher."""
    engine.add(prompt(1), 60, "A", priority=1)
    engine.step()
    engine.step()
    engine.add(prompt(2), 60, "B", priority=0)
    for _ in range(3):
        engine.step()
    engine.add(prompt(3), 1, "C", priority=priority)


def test_a_drain_spares_the_highest_priority_that_runs(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=2, slot_patience=4, drain_steps=2)
    _drained_for(engine, 1)
    engine.run()
    assert starts_of(engine) == [1, 2, 3, 1]
    assert engine.scheduler.stats().counters.adapter_loads == 4


@pytest.mark.parametrize("num_steps", [0, 1, 5, 12])
def test_a_slot_that_was_drained_is_of_use_before_a_higher_priority_takes_it_back(
    make_engine: MakeEngine, num_steps: int
) -> None:
    engine = make_engine(num_slots=2, slot_patience=4, drain_steps=2)
    _drained_for(engine, 2)
    engine._loads_at_once = False
    while not engine.loads:
        engine.step()
    for _ in range(num_steps):  # however long the load takes, it is not the adapter's doing
        engine.step()
    assert engine.finish_load() == "C"
    engine.step()
    assert engine.finish_reason(3) == "length"
    stats = engine.scheduler.stats()
    assert (stats.counters.preemptions, stats.counters.adapter_loads) == (
        1,
        3,
    )  # not once for each time it waited
