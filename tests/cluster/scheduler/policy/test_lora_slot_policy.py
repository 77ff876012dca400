"""Who gets a slot, and when."""

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import Conflict, ErrorInfo, InvalidRequest
from cluster.request import BASE
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from tests.cluster.scheduler.slot_waits import SlotWaits
from tests.random_cases import num_cases
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]

_salts = count()


def prompt(length: int = 5) -> tuple[int, ...]:
    salt = next(_salts)
    return tuple(salt * 1000 + i for i in range(length))


def starts_of(engine: FakeEngine) -> list[int]:
    return [start.seq_id for plan in engine.plans for start in plan.starts]


def test_others_go_on_while_an_adapter_loads(make_engine: MakeEngine) -> None:
    engine = make_engine(loads_at_once=False)
    engine.add(prompt(), 5, "A")
    engine.add(prompt(), 5, BASE)
    for _ in range(3):
        engine.step()
    assert starts_of(engine) == [2]
    assert [(load.adapter, load.slot) for load in engine.loads] == [("A", 0)]
    assert engine.scheduler.stats().num_waiting_for_adapter == 1
    engine.finish_load()
    engine.step()
    assert starts_of(engine) == [2, 1]
    assert engine.plans[-1].starts[0].slot == 0


def test_one_load_serves_all_who_wait_for_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for _ in range(5):
        engine.add(prompt(), 2, "A")
    engine.run()
    assert engine.scheduler.stats().counters.adapter_loads == 1


def test_a_load_that_fails_leaves_nothing_of_what_it_was_to_replace(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=1, loads_at_once=False)
    engine.add(prompt(), 2, "A")
    engine.step()
    engine.finish_load()
    engine.run()
    assert engine.bank() == ["A"]
    engine.add(prompt(), 2, "B")
    while not engine.loads:
        engine.step()
    (load,) = engine.loads
    assert (load.slot, load.replaces) == (0, "A")
    engine.fail_load(ErrorInfo("NotFound", "adapter B is gone"))
    assert engine.bank() == [None]


def test_a_failed_load_ends_exactly_those_who_wait_for_it(make_engine: MakeEngine) -> None:
    engine = make_engine(loads_at_once=False)
    for adapter in ("A", BASE, "A", "B"):
        engine.add(prompt(), 2, adapter)
    engine.step()
    error = ErrorInfo("NotFound", "adapter A is gone")
    assert engine.fail_load(error) == "A"
    assert [engine.events[seq_id][-1].error for seq_id in (1, 3)] == [error, error]
    engine.finish_load()
    engine.run()
    assert [engine.finish_reason(seq_id) for seq_id in (2, 4)] == ["length", "length"]
    engine.add(prompt(), 2, "A")  # and a later request tries again, in the slot that was freed
    engine.step()
    assert [(load.adapter, load.slot) for load in engine.loads] == [("A", 0)]


def test_an_idle_adapter_makes_room_in_lru_order(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=2)
    for adapter in ("A", "B", "A", "C"):
        engine.add(prompt(), 2, adapter)
        engine.run()
    slots = {slot.adapter: slot.slot for slot in engine.scheduler.stats().slots}
    assert slots == {"A": 0, "C": 1}


def test_a_slot_is_reloaded_only_when_the_ranks_have_let_it_go(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, loads_at_once=False)
    engine.add(prompt(), 1, "A")
    engine.step()
    engine.finish_load()
    engine.step()
    engine.add(prompt(), 1, "B")
    assert engine.scheduler.take_loads() == []  # no plan has ended sequence 1 yet
    plan = engine.begin_step()
    assert plan is not None and (plan.ends, plan.chunks) == ((1,), ())
    assert engine.loads == []
    engine.end_step()
    engine.step()
    assert engine.finish_load() == "B"
    engine.run()
    assert engine.finish_reason(2) == "length"


def test_who_has_no_slot_is_passed_over_and_blocks_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, slot_patience=1000)
    engine.add(prompt(), 20, "A")
    engine.step()
    engine.step()
    engine.add(prompt(), 1, "B")
    engine.add(prompt(), 1, "A")
    engine.add(prompt(), 1, BASE)
    engine.step()
    assert starts_of(engine) == [1, 3, 4]
    engine.run()
    assert starts_of(engine) == [1, 3, 4, 2]


def test_base_requests_cost_no_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=0)
    engine.add(prompt(), 2, BASE)
    engine.run()
    assert engine.finish_reason(1) == "length"
    with pytest.raises(InvalidRequest, match="no adapter slots"):
        engine.add(prompt(), 2, "A")


def test_a_running_decode_is_never_skipped_for_the_slot_cap(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=2, slot_patience=1000)
    engine.add(prompt(), 30, "A")
    engine.add(prompt(), 30, "B")
    for adapter in "CDEF":
        engine.add(prompt(), 30, adapter)
    while len(engine.tokens(2)) < 1:
        engine.step()
    for _ in range(20):
        plan = engine.step()
        assert plan is not None and [c.seq_id for c in plan.chunks] == [1, 2]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_passed_over_adapter_gets_its_slot_within_the_bound(
    make_engine: MakeEngine, num_slots: int
) -> None:
    engine = make_engine(num_slots=num_slots, num_pages=400, max_model_len=60)
    hot = "ABC"[:num_slots]
    expected: dict[int, tuple[str, tuple[int, ...]]] = {}

    def offer(adapter: str, num_tokens: int) -> int:
        token_ids = prompt()
        seq_id = engine.add(token_ids, num_tokens, adapter)
        expected[seq_id] = (adapter, fake_continuation(adapter, token_ids, num_tokens))
        return seq_id

    for adapter in hot:
        offer(adapter, 40)
    for _ in range(3):
        engine.step()
    cold = [offer(adapter, 3) for adapter in ("X", "Y")]
    while not all(engine.finish_reason(seq_id) for seq_id in cold):
        for adapter in hot:  # an endless stream: without turns X and Y would wait forever
            if engine.scheduler.stats().num_waiting < 40:
                offer(adapter, 40)
        engine.step()
    engine.run()
    config = engine.scheduler.config
    bound = config.slot_wait_bound(2 + num_slots, num_slots, turn_start=3)
    assert 8 <= engine.scheduler.stats().longest_slot_wait <= bound
    for seq_id, (_, tokens) in expected.items():
        assert engine.tokens(seq_id) == tokens


def test_a_drain_ends_when_its_cause_has_gone(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, slot_patience=4, drain_steps=100)
    engine.add(prompt(), 60, "A")
    for _ in range(3):
        engine.step()
    engine.add(prompt(), 3, "B")
    for _ in range(8):
        engine.step()
    engine.add(prompt(), 3, "A")
    engine.step()
    assert 3 not in starts_of(engine)
    engine.abort(2)
    engine.step()
    assert 3 in starts_of(engine)
    engine.run()
    assert engine.scheduler.stats().counters.adapter_loads == 1


def test_a_pinned_adapter_is_never_evicted_nor_drained(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=2, slot_patience=3, drain_steps=2)
    engine.scheduler.pin("A")
    engine.add(prompt(), 40, "A")
    for adapter in "BCDE":
        engine.add(prompt(), 20, adapter)
    engine.run()
    assert "A" in {slot.adapter for slot in engine.scheduler.stats().slots if slot.pinned}
    assert starts_of(engine).count(1) == 1
    for _ in range(3):
        engine.add(prompt(), 1, "F")
        engine.run()
    assert "A" in {slot.adapter for slot in engine.scheduler.stats().slots}
    engine.scheduler.unpin("A")
    engine.add(prompt(), 1, "G")
    engine.run()
    assert "A" not in {slot.adapter for slot in engine.scheduler.stats().slots}


def test_pins_must_leave_a_slot_for_the_others(make_engine: MakeEngine) -> None:
    scheduler = make_engine(num_slots=2).scheduler
    scheduler.pin("A")
    scheduler.pin("A")
    with pytest.raises(Conflict, match="must stay free"):
        scheduler.pin("B")


def test_the_oldest_sequence_keeps_the_only_slot_until_it_ends(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, slot_patience=2, drain_steps=2)
    engine.add(prompt(), 40, "A")
    engine.step()
    engine.step()
    engine.add(prompt(), 1, "B")
    engine.run()
    assert engine.scheduler.stats().counters.preemptions == 0
    assert starts_of(engine) == [1, 2]
    assert engine.scheduler.stats().longest_slot_wait > 30


def test_a_drain_spares_the_slot_of_the_oldest_sequence(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=2, slot_patience=4, drain_steps=2)
    engine.add(prompt(), 60, "A")  # least recently used, but the oldest
    engine.step()
    engine.step()
    engine.add(prompt(), 60, "B")
    for _ in range(3):
        engine.step()
    engine.add(prompt(), 1, "C")
    while engine.finish_reason(3) is None:
        engine.step()
    assert engine.plans[-1].starts == () or engine.plans[-1].starts[0].seq_id == 3
    ends = [end for plan in engine.plans for end in plan.ends]
    assert ends == [2]
    engine.run()
    assert starts_of(engine) == [1, 2, 3, 2]


def test_a_turn_on_a_slot_is_long_enough_to_be_of_use(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1, slot_patience=8, drain_steps=2)
    engine.add(prompt(), 100, BASE)  # the oldest, so that the slot's own sequences may be preempted
    for adapter in "ABC":
        engine.add(prompt(), 50, adapter)
    steps, num_loads = [], 0
    while engine.finish_reason(1) is None:
        engine.step()
        stats = engine.scheduler.stats()
        if stats.counters.adapter_loads > num_loads:
            num_loads = stats.counters.adapter_loads
            steps.append(stats.step)
    gaps = [later - earlier for earlier, later in zip(steps, steps[1:], strict=False)]
    assert len(gaps) > 3
    assert all(8 <= gap <= 8 + 2 + 3 for gap in gaps)


@settings(max_examples=num_cases(60), deadline=None)
@given(
    num_slots=st.integers(1, 4),
    num_hot=st.integers(1, 4),
    patience=st.integers(1, 12),
    drain_steps=st.integers(1, 12),
    max_running=st.integers(2, 8),
    arrivals=st.lists(st.integers(0, 60), min_size=1, max_size=6),
)
def test_however_hot_the_others_are_every_slot_comes_within_its_bound(
    num_slots: int,
    num_hot: int,
    patience: int,
    drain_steps: int,
    max_running: int,
    arrivals: list[int],
) -> None:
    config = tiny_config(
        num_pages=400,
        num_slots=num_slots,
        slot_patience=patience,
        drain_steps=drain_steps,
        max_running=max_running,
        max_waiting=200,
        token_budget=64,
        max_model_len=1200,
    )
    engine = FakeEngine(config)
    waits = SlotWaits(engine.scheduler)
    hot = [f"hot {number}" for number in range(num_hot)]
    for step in range(300):
        stats = engine.scheduler.stats()
        for adapter in hot:  # each of them alone would fill the batch for ever
            if stats.num_waiting < 4 * num_hot:
                engine.add((step % 7, 2, 3), max_tokens=200, adapter=adapter)
        for number, arrival in enumerate(arrivals):
            if step == arrival:
                engine.add((9, 9), max_tokens=2, adapter=f"cold {number}")
        engine.step()
    assert waits.num_waits >= min(num_slots, num_hot)
