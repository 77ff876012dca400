"""Forgetting an adapter wholly."""

from collections.abc import Callable

import pytest

from cluster.errors import Conflict, ErrorInfo, NotFound
from cluster.request import BASE
from cluster.scheduler.stats import UnloadedAdapter
from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]

PROMPT = tuple(range(13))


def test_unload_frees_the_slot_and_drops_every_namespace_of_the_adapter(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.add(PROMPT, 1, BASE)
    engine.add(PROMPT, 1, "A")
    engine.add(PROMPT, 1, "A", salt="tenant")
    engine.run()
    engine.unload("A")
    engine.step()  # the ranks are told that the sequences on the slot have ended
    assert engine.unloaded == [UnloadedAdapter("A", freed_pages=6, freed_slots=((0, "A"),))]
    stats = engine.scheduler.stats()
    assert (stats.slots, stats.cached_pages) == ((), 3)


def test_unload_refuses_new_requests_and_lets_accepted_ones_end(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, 9, "A")
    engine.step()
    engine.step()
    engine.add((9, 9), 3, "A")
    engine.unload("A")
    with pytest.raises(NotFound, match="being unloaded"):
        engine.add(PROMPT, 1, "A")
    engine.add(PROMPT, 1, BASE)
    engine.run()
    assert engine.tokens(1) == fake_continuation("A", PROMPT, 9)
    assert engine.tokens(2) == fake_continuation("A", (9, 9), 3)
    engine.step()
    assert [gone.digest for gone in engine.unloaded] == ["A"]


def test_the_same_adapter_loaded_again_is_served_and_starts_cold(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, 2, "A")
    engine.run()
    engine.unload("A")
    engine.step()
    assert len(engine.unloaded) == 1
    engine.add(PROMPT, 2, "A")
    engine.run()
    assert engine.num_cached_tokens(2) == 0
    assert engine.tokens(2) == engine.tokens(1)
    assert engine.scheduler.stats().counters.adapter_loads == 2


def test_an_eviction_from_the_slot_keeps_the_pages_warm(make_engine: MakeEngine) -> None:
    engine = make_engine(num_slots=1)
    for adapter in "ABA":
        engine.add(PROMPT, 2, adapter)
        engine.run()
    assert engine.num_cached_tokens(3) == 12


def test_unload_is_idempotent_and_answers_once_also_for_strangers(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, 5, "A")
    engine.step()
    engine.unload("A")
    engine.unload("A")
    engine.run()
    engine.step()
    engine.unload("never seen")
    assert [gone.digest for gone in engine.unloaded] == ["A", "never seen"]
    assert engine.unloaded[1] == UnloadedAdapter("never seen", 0, ())


def test_an_unload_during_the_load_waits_for_it(make_engine: MakeEngine) -> None:
    engine = make_engine(loads_at_once=False)
    engine.add(PROMPT, 1, "A")
    engine.step()
    engine.unload("A")
    engine.abort(1)
    engine.step()
    assert engine.unloaded == []  # shards are on their way into the slot
    engine.finish_load()
    engine.step()
    assert engine.unloaded == [UnloadedAdapter("A", 0, ((0, "A"),))]


def test_an_unload_whose_load_fails_is_complete(make_engine: MakeEngine) -> None:
    engine = make_engine(loads_at_once=False)
    engine.add(PROMPT, 1, "A")
    engine.step()
    engine.unload("A")
    engine.fail_load(ErrorInfo("NotFound", "gone"))
    assert [gone.digest for gone in engine.unloaded] == ["A"]
    assert engine.scheduler.stats().slots == ()


def test_an_unload_taken_back_keeps_everything(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, 5, "A")
    engine.step()
    engine.unload("A")
    engine.scheduler.allow("A")
    engine.scheduler.allow("never unloaded")
    engine.add(PROMPT, 1, "A")
    engine.run()
    assert engine.unloaded == [UnloadedAdapter("A", 0, ())]
    assert engine.scheduler.stats().slots[0].adapter == "A"


def test_unload_also_takes_the_pin(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.scheduler.pin("A")
    engine.add(PROMPT, 1, "A")
    engine.run()
    engine.unload("A")
    engine.step()
    assert engine.scheduler.stats().slots == ()
    engine.scheduler.pin("B")


def test_the_base_model_cannot_be_unloaded(make_engine: MakeEngine) -> None:
    with pytest.raises(Conflict):
        make_engine().scheduler.unload(BASE)


def test_a_forced_unload_ends_everything_of_the_adapter_and_nothing_else(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_running=2, token_budget=12, max_chunk=4)
    running = engine.add_choices(PROMPT, 3, 9, "A")  # one prefills, two are held
    other = engine.add(PROMPT, 5)
    engine.step()
    engine.step()
    waiting = engine.add(PROMPT, 9, "A")
    engine.begin_step()
    engine.unload("A", force=True)
    engine.end_step()
    for seq_id in (*running, waiting):
        last = engine.events[seq_id][-1]
        assert last.error is not None and last.error.name == "NotFound"
        assert [e.finish_reason for e in engine.events[seq_id]].count("error") == 1
    engine.run()
    assert [gone.digest for gone in engine.unloaded] == ["A"]
    assert engine.tokens(other) == fake_continuation(None, PROMPT, 5)
    assert engine.scheduler.stats().held_pages == 0


def test_a_patient_unload_can_still_be_forced(make_engine: MakeEngine) -> None:
    engine = make_engine()
    seq_id = engine.add(PROMPT, 50, "A")
    engine.step()
    engine.step()
    engine.unload("A")
    assert engine.finish_reason(seq_id) is None
    engine.unload("A", force=True)
    assert engine.finish_reason(seq_id) == "error"
    engine.run()
    assert [gone.digest for gone in engine.unloaded] == ["A"]
