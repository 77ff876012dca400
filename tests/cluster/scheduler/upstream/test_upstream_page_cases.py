"""What other engines test of the pages of running work, told of ours: taken, kept, given back.

Each test names the case that it is.
"""

from collections.abc import Callable
from itertools import permutations

import pytest

from cluster.scheduler.kv_cache.page_pool import PagePool
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.protocol import Plan
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]


def prompt(salt: int, length: int = 5) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


def sequences_in(plan: Plan | None) -> list[int]:
    assert plan is not None
    return [chunk.seq_id for chunk in plan.chunks]


@pytest.mark.parametrize("num_host_pages", [0, 6])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_when_all_have_ended_nothing_is_held(
    make_engine: MakeEngine, prefix_cache: bool, num_host_pages: int
) -> None:
    """Case 14 (vLLM)."""
    engine = make_engine(
        num_pages=12, num_slots=3, prefix_cache=prefix_cache, num_host_pages=num_host_pages
    )
    for salt in range(12):
        adapter = ("A", "B", "C")[salt % 3]
        seq_id = engine.add(prompt(salt % 5, 9), 20, adapter, priority=salt % 2)
        engine.add_choices(prompt(salt), 2, 6, adapter)
        engine.step()
        if salt % 4 == 3:
            engine.abort(seq_id)
        if salt % 4 == 2:
            engine.expire(seq_id)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.counters.preemptions > 0
    assert (stats.num_running, stats.num_waiting, stats.held_pages) == (0, 0, 0)
    for adapter in "ABC":
        engine.unload(adapter)
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.free_pages, stats.free_host_pages) == (12, num_host_pages)
    assert len(engine.unloaded) == 3 and stats.slots == ()


def test_the_lowest_priority_is_preempted_and_of_equals_the_last_to_arrive(
    make_engine: MakeEngine,
) -> None:
    """Case 15 (vLLM)."""
    chains = set()
    for _ in range(2):
        engine = make_engine(num_pages=15)
        for salt, priority in enumerate((0, 5, 5, 1)):
            engine.add(prompt(salt), 20, priority=priority)
        victims = []
        while not engine.is_idle:
            plan = engine.step()
            if plan is not None:
                victims += [end for end in plan.ends if engine.finish_reason(end) is None]
        assert victims[:2] == [3, 2]
        assert victims.count(1) == 0
        chains.add(engine.digest)
    assert len(chains) == 1


@pytest.mark.parametrize("ending", ["abort", "expire"])
def test_pages_that_a_step_under_way_writes_are_nobody_elses_before_it_ends(
    make_engine: MakeEngine, ending: str
) -> None:
    """Case 17 (vLLM)."""
    engine = make_engine(num_pages=8, max_model_len=32, num_slots=1)
    engine.add(prompt(1, 20), 4, "A")
    engine.step()
    engine.step()
    engine.begin_step()
    before = engine.scheduler.stats()
    (engine.abort if ending == "abort" else engine.expire)(1)
    engine.unload("A")
    engine.add(prompt(2, 20), 1)
    during = engine.scheduler.stats()
    assert before.held_pages == during.held_pages == 6
    assert during.slots == before.slots and not engine.unloaded
    engine.end_step()
    after = engine.scheduler.stats()
    assert (after.held_pages, after.slots[0].leases) == (0, 0)
    assert not engine.unloaded  # the ranks have not been told
    engine.run()
    assert [gone.digest for gone in engine.unloaded] == ["A"]
    assert engine.tokens(2) == fake_continuation(None, prompt(2, 20), 1)


def test_who_is_preempted_is_the_last_in_order_and_not_the_one_with_most_pages(
    make_engine: MakeEngine,
) -> None:
    """Case 48 (tokenspeed), preemption: theirs takes the largest, ours keeps the order."""
    engine = make_engine(num_pages=13, max_model_len=44)
    engine.add(prompt(1), 20)
    engine.add(prompt(2, 24), 12)
    engine.add(prompt(3, 2), 20)
    while not engine.scheduler.stats().counters.preemptions:
        engine.step()
    victims = [end for end in engine.plans[-1].ends if engine.finish_reason(end) is None]
    assert victims == [3]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prefill_that_is_aborted_gives_every_page_back(
    make_engine: MakeEngine, num_steps: int
) -> None:
    """Case 48 (tokenspeed), abort."""
    for prefix_cache in (False, True):
        engine = make_engine(prefix_cache=prefix_cache, max_chunk=8)
        engine.add(prompt(1, 40), 1)
        for _ in range(num_steps):
            engine.step()
        assert engine.scheduler.stats().held_pages == 2 * num_steps
        engine.abort(1)
        stats = engine.scheduler.stats()
        num_kept = 2 * num_steps if prefix_cache else 0
        assert (stats.held_pages, stats.cached_pages) == (0, num_kept)
        assert stats.free_pages + stats.cached_pages == 64


def test_a_full_hit_computes_the_last_token_and_a_second_turn_finds_the_answer(
    make_engine: MakeEngine,
) -> None:
    """Case 48 (tokenspeed), hits."""
    engine = make_engine()
    engine.add(prompt(1, 16), 9)
    engine.run()
    engine.add(prompt(1, 16), 1)
    engine.run()
    (chunk,) = engine.plans[-1].chunks
    assert (engine.num_cached_tokens(2), chunk.start, len(chunk.token_ids)) == (12, 12, 4)
    engine.add(prompt(1, 16) + engine.tokens(1) + (7, 7, 7), 1)
    engine.run()
    assert engine.num_cached_tokens(3) == 24


def test_what_does_not_fit_waits_and_takes_nothing_until_it_does(make_engine: MakeEngine) -> None:
    """Cases 47 and 48 (tokenspeed), the shortfall."""
    engine = make_engine(num_pages=8, max_model_len=32)
    engine.add(prompt(1, 13), 8)
    engine.step()
    engine.add(prompt(2, 20), 1)
    while engine.finish_reason(1) is None:
        plan = engine.step()
        assert sequences_in(plan) == [1]
        stats = engine.scheduler.stats()
        assert stats.num_waiting == 1
        assert (stats.counters.evicted_pages, stats.counters.preemptions) == (0, 0)
    engine.run()
    assert engine.tokens(2) == fake_continuation(None, prompt(2, 20), 1)


def test_the_smallest_free_page_or_slot_is_given_out_whatever_the_order_of_return() -> None:
    """Case 45 (tokenspeed)."""
    for order in permutations((0, 2, 3)):
        pool, slots = PagePool(5), SlotTable(4)
        pool.allocate(4)
        for slot in range(4):
            assert slots.reserve(str(slot), 0, 1) == slot
            slots.loaded(str(slot), 1)
        for index in order:
            pool.free([index])
            slots.free(str(index), 2)
        assert pool.allocate(4) == [0, 2, 3, 4]
        assert [slots.reserve(name, 0, 3) for name in "abc"] == [0, 2, 3]


def test_looking_and_being_turned_away_make_nothing_younger(make_engine: MakeEngine) -> None:
    """Cases 9 (vLLM) and 47 (tokenspeed)."""
    engine = make_engine(num_pages=12, max_model_len=40)
    for salt in (1, 2):  # three pages each; those of 1 are the older ones
        engine.add(prompt(salt, 13), 1)
        engine.run()
    engine.add(prompt(3, 5), 12)
    engine.step()
    before = engine.scheduler.stats()
    turned_away = engine.add(prompt(1, 13) + prompt(4, 25), 1)  # on the pages of 1, if it fitted
    for _ in range(3):
        engine.step()
    after = engine.scheduler.stats()
    assert after.num_waiting == 1 and after.counters.evicted_pages == before.counters.evicted_pages
    assert after.held_pages == before.held_pages  # nothing is locked or taken in advance
    engine.abort(turned_away)
    engine.add(prompt(5, 16), 1)  # needs pages of others: the older ones go
    engine.run()
    engine.add(prompt(2, 13), 1)
    engine.run()
    assert engine.num_cached_tokens(6) == 12
    engine.add(prompt(1, 13), 1)
    engine.run()
    assert engine.num_cached_tokens(7) < 12
