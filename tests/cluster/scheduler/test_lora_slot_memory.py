"""Adapters of different sizes share a budget of bytes, not only a number of slots."""

from collections.abc import Callable

import pytest

from cluster.errors import Conflict, NotFound
from cluster.scheduler.stats import UnloadedAdapter
from cluster.scheduler.testing.fake_engine import FakeEngine

MakeEngine = Callable[..., FakeEngine]
PROMPT = (1, 2, 3, 4, 5)
SUM = "A:0.5,B:2.0"


def serve(engine: FakeEngine, adapter: str, num_bytes: int, max_tokens: int = 2) -> int:
    """Serve one request to its end."""
    seq_id = engine.add(PROMPT, max_tokens, adapter, adapter_bytes=num_bytes)
    engine.run()
    assert engine.finish_reason(seq_id) == "length"
    return seq_id


def residents(engine: FakeEngine) -> set[str]:
    """Return the adapters in slots."""
    return {slot.adapter for slot in engine.scheduler.stats().slots}


def test_small_adapters_fill_the_slots_and_a_large_one_takes_the_place_of_several(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=4, adapter_memory=100)
    for adapter in "ABCD":
        serve(engine, adapter, 25)
    assert residents(engine) == set("ABCD")
    serve(engine, "E", 60)
    assert residents(engine) == {"D", "E"}
    assert engine.begun[-1].clears == ((0, "A"), (1, "B"), (2, "C"))


def test_an_adapter_goes_no_sooner_than_its_memory_is_of_use(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=3, adapter_memory=100, slot_patience=1000)
    serve(engine, "A", 30)
    busy = engine.add(PROMPT, 40, "B", adapter_bytes=60)
    engine.step()
    engine.step()
    engine.add(PROMPT, 2, "C", adapter_bytes=50)  # would not fit in the place of A
    for _ in range(10):
        engine.step()
    assert residents(engine) == {"A", "B"}
    engine.run()
    assert engine.finish_reason(busy) == "length"
    assert residents(engine) == {"A", "C"}  # A was used before B, but B alone is enough


def test_the_load_of_one_waits_for_the_memory_that_the_one_before_it_clears(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=3, adapter_memory=100, loads_at_once=False)
    first = engine.add(PROMPT, 1, "A", adapter_bytes=100)
    engine.step()
    engine.finish_load()
    engine.step()
    assert engine.finish_reason(first) == "length"
    engine.add(PROMPT, 1, "B", adapter_bytes=50)
    engine.add(PROMPT, 1, "C", adapter_bytes=50)
    assert engine.scheduler.take_loads() == []  # no rank has been told that A has ended
    engine.step()
    engine.step()
    assert [load.adapter for load in engine.loads] == ["B", "C"]
    assert [load.clears for load in engine.loads] == [((0, "A"),), ()]


def test_several_are_drained_for_a_large_one_within_the_bound(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=3, adapter_memory=90, num_pages=400, max_model_len=60)
    for adapter in "ABC":
        engine.add(PROMPT, 40, adapter, adapter_bytes=30)
    for _ in range(3):
        engine.step()
    large = engine.add(PROMPT, 3, "X", adapter_bytes=90)
    while engine.finish_reason(large) is None:
        for adapter in "ABC":
            if engine.scheduler.stats().num_waiting < 40:
                engine.add(PROMPT, 40, adapter, adapter_bytes=30)
        engine.step()
    stats = engine.scheduler.stats()
    bound = engine.scheduler.config.slot_wait_bound(1, 3, turn_start=3, is_crowded=True)
    assert 8 <= stats.longest_slot_wait <= bound
    assert stats.counters.preemptions > 0


def test_the_foremost_sequence_is_waited_for_where_no_other_memory_is_enough(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=3, adapter_memory=90)
    foremost = engine.add(PROMPT, 60, "A", adapter_bytes=60)
    engine.add(PROMPT, 60, "A", adapter_bytes=60)
    for _ in range(3):
        engine.step()
    large = engine.add(PROMPT, 2, "X", adapter_bytes=40)
    while engine.finish_reason(large) is None:
        engine.step()
    assert engine.finish_reason(foremost) == "length"
    assert engine.scheduler.stats().counters.preemptions == 1  # the other one of A
    engine.run()


def test_what_could_never_fit_is_refused_with_the_numbers(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=3, adapter_memory=100)
    engine.scheduler.pin("A", 70)
    with pytest.raises(Conflict, match=r"claims 40 bytes .* of 100 bytes .* 70 are pinned"):
        engine.add(PROMPT, 1, "B", adapter_bytes=40)
    serve(engine, "A", 70)  # the pinned one itself
    serve(engine, "B", 30)
    assert residents(engine) == {"A", "B"}


def test_no_more_is_pinned_than_leaves_room_for_what_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=4, adapter_memory=100, loads_at_once=False)
    engine.add(PROMPT, 1, "C", adapter_bytes=50)
    engine.scheduler.pin("A", 40)
    with pytest.raises(Conflict, match="40 of 100 bytes for adapters are pinned; 20 more"):
        engine.scheduler.pin("B", 20)
    engine.scheduler.pin("C", 50)  # is what waits


def test_without_a_budget_slots_alone_are_the_limit(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=2)
    serve(engine, "A", 10**15)
    serve(engine, "B", 10**15)
    assert residents(engine) == {"A", "B"}


def test_a_sum_is_an_adapter_of_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=3)
    prompt = tuple(range(12))
    for adapter in ("A", "B", SUM):
        seq_id = engine.add(prompt, 1, adapter)
        engine.run()
        assert engine.num_cached_tokens(seq_id) == 0
    again = engine.add(prompt, 1, SUM)
    engine.run()
    assert engine.num_cached_tokens(again) == 8
    assert residents(engine) == {"A", "B", SUM}


def test_a_sum_goes_with_each_of_its_parts(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=3)
    running = engine.add(PROMPT, 20, SUM)
    serve_b = engine.add(PROMPT, 1, "B")
    engine.step()
    engine.step()
    engine.unload("A")
    with pytest.raises(NotFound):
        engine.add(PROMPT, 1, SUM)
    engine.add(PROMPT, 1, "B")
    assert engine.unloaded == []  # the sum still runs
    engine.run()
    assert engine.finish_reason(running) == engine.finish_reason(serve_b) == "length"
    assert engine.unloaded == [UnloadedAdapter("A", freed_pages=6, freed_slots=((0, SUM),))]
    assert residents(engine) == {"B"}


def test_a_forced_unload_ends_the_sums_as_well(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1)
    running = engine.add(PROMPT, 20, SUM)
    waiting = engine.add(PROMPT, 20, "B:3.0")
    other = engine.add(PROMPT, 2, "C")
    engine.step()
    engine.step()
    engine.unload("B", force=True)
    engine.run()
    assert engine.finish_reason(running) == engine.finish_reason(waiting) == "error"
    assert engine.finish_reason(other) == "length"


def test_memory_of_an_evicted_adapter_that_no_load_has_cleared_is_freed_by_its_unload(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_slots=3, adapter_memory=90, slot_patience=2, drain_steps=1)
    for adapter, num_bytes in (("A", 60), ("B", 30), ("A", 60)):
        engine.add(PROMPT, 60, adapter, adapter_bytes=num_bytes)
        for _ in range(3):
            engine.step()
    large = engine.add(PROMPT, 2, "X", adapter_bytes=90)
    for _ in range(10):
        engine.step()
    assert residents(engine) == {"A"}
    engine.scheduler.abort(large)  # B has gone for X, which does not come
    engine.unload("B", force=True)
    engine.run()
    assert [(gone.digest, gone.freed_slots) for gone in engine.unloaded] == [("B", ((1, "B"),))]
