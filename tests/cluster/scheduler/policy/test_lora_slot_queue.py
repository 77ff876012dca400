"""Who has waited longer for a slot than the bound said when it came is counted."""

from collections.abc import Callable
from itertools import count

from cluster.request import BASE
from cluster.scheduler.replay.state import decode_state, encode_state
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.slot_waits import SlotWaits

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


def order_of(engine: FakeEngine, asked: dict[int, str]) -> list[str]:
    """Return the adapters in the order in which their sequences began."""
    return [asked[start.seq_id] for plan in engine.plans for start in plan.starts]


def asked_of(
    engine: FakeEngine, tenant: str, adapters: list[str], *, weight: int = 1
) -> dict[int, str]:
    return {
        engine.add(prompt(), 1, adapter, tenant=tenant, weight=weight): adapter
        for adapter in adapters
    }


def test_of_two_tenants_each_has_the_next_slot_in_turn(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, fairness=True)
    asked = asked_of(engine, "large", ["A", "B", "C", "D", "E"])
    asked |= asked_of(engine, "small", ["S", "T"])
    engine.run()
    assert order_of(engine, asked) == ["A", "B", "S", "C", "T", "D", "E"]


def test_turns_follow_the_weights(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, fairness=True)
    asked = asked_of(engine, "heavy", list("ABCDEFGH"), weight=2)
    asked |= asked_of(engine, "light", ["S", "T", "U"])
    engine.run()
    assert order_of(engine, asked) == list("ABSCDTEFUGH")


def test_an_adapter_is_overtaken_by_fewer_than_were_before_it(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, fairness=True)
    asked = asked_of(engine, "large", list("ABCD"))  # A has a slot at once; B is the first in line
    for name in "STUV":
        asked |= asked_of(engine, name, [name])
    engine.run()
    assert order_of(engine, asked) == list("ABSCTDUV")


def test_without_fairness_who_came_first_has_the_next_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, fairness=False)
    asked = asked_of(engine, "large", ["A", "B", "C"]) | asked_of(engine, "small", ["S"])
    engine.run()
    assert order_of(engine, asked) == ["A", "B", "C", "S"]


def test_an_adapter_that_several_tenants_ask_for_has_the_turn_of_the_soonest(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=1, fairness=True)
    asked = asked_of(engine, "large", ["A", "B", "C", "D"])
    asked |= asked_of(engine, "small", ["D"])
    engine.run()
    assert [one for one in order_of(engine, asked) if one != "D"] == ["A", "B", "C"]
    asked = asked_of(engine, "large", ["A", "B", "C"])
    asked |= asked_of(engine, "small", ["C", "S", "T"])
    del engine.plans[:]
    engine.run()
    assert order_of(engine, asked)[-1] == "T"


def test_however_many_tenants_come_later_an_adapter_waits_no_longer_than_its_bound(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=1, fairness=True, max_waiting=400)
    waits = SlotWaits(engine.scheduler)
    asked = asked_of(engine, "large", [f"L{n}" for n in range(6)])
    for number in range(120):
        asked |= asked_of(engine, f"tenant {number}", [f"T{number}"])
        engine.step()
    engine.run()
    assert waits.num_waits >= 120
    assert engine.scheduler.stats().counters.late_slots == 0
    order = order_of(engine, asked)
    assert order.index("L5") == 5 + 4  # others came before it, but no more than were there
