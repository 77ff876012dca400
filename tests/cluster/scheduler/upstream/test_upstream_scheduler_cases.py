"""What other engines test of their schedulers, told of ours: whose turn it is, slots and limits.

Each test names the case that it is. Random work is in `test_upstream_random_cases`.
"""

from array import array
from collections.abc import Callable
from itertools import permutations

import pytest

from cluster.errors import InvalidRequest, Overloaded
from cluster.request import BASE
from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.engine.sequences import SequenceTable
from worker.pools import PageCounts
from worker.protocol import GENESIS, Plan, encode_plan
from worker.testing.fake_rank import FakeRank, fake_continuation

MakeEngine = Callable[..., FakeEngine]


def prompt(salt: int, length: int = 5) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


def starts_of(engine: FakeEngine) -> list[int]:
    return [start.seq_id for plan in engine.plans for start in plan.starts]


def sequences_in(plan: Plan | None) -> list[int]:
    assert plan is not None
    return [chunk.seq_id for chunk in plan.chunks]


def test_an_adapter_whose_last_token_is_under_way_keeps_its_slot(make_engine: MakeEngine) -> None:
    """Case 11 (vLLM)."""
    engine = make_engine(num_slots=1)
    engine.add(prompt(1), 2, "A")
    engine.step()
    engine.step()
    engine.begin_step()  # the last token of A's only sequence
    engine.add(prompt(2), 1, "B")
    assert engine.scheduler.take_loads() == []
    (slot,) = engine.scheduler.stats().slots
    assert (slot.adapter, slot.leases) == ("A", 1)
    engine.end_step()
    engine.run()
    assert engine.tokens(1) == fake_continuation("A", prompt(1), 2)
    assert engine.tokens(2) == fake_continuation("B", prompt(2), 1)


def test_an_adapter_that_the_token_budget_passes_over_in_a_step_keeps_its_slot(
    make_engine: MakeEngine,
) -> None:
    """Case 12 (vLLM)."""
    engine = make_engine(num_slots=1, token_budget=12, max_chunk=11, slot_patience=1000)
    engine.add(prompt(1, 100), 1, "A", priority=1)
    engine.step()
    engine.step()
    engine.add(prompt(2, 15), 1, priority=0)
    assert sequences_in(engine.step()) == [1, 2]  # eight tokens, then four
    engine.add(prompt(3), 1, "B", priority=0)
    assert sequences_in(engine.step()) == [2]  # its last eleven tokens leave less than a page
    (slot,) = engine.scheduler.stats().slots
    assert (slot.adapter, slot.leases) == ("A", 1)
    engine.run()
    assert engine.tokens(1) == fake_continuation("A", prompt(1, 100), 1)
    assert starts_of(engine) == [1, 2, 3]


def test_who_was_passed_over_comes_in_order_of_arrival_and_before_later_ones(
    make_engine: MakeEngine,
) -> None:
    """Case 13 (vLLM)."""
    engine = make_engine(loads_at_once=False, max_running=1)
    for salt, adapter in enumerate(("A", "B", BASE, "A", "B", BASE)):
        engine.add(prompt(salt), 1, adapter)
    engine.step()
    assert starts_of(engine) == [3]  # all before it wait for their adapters
    engine.add(prompt(7), 1)
    assert [engine.finish_load(), engine.finish_load()] == ["A", "B"]
    engine.run()
    assert starts_of(engine) == [3, 1, 2, 4, 5, 6, 7]


def test_choices_count_one_by_one_are_taken_all_or_none_and_leave_nothing_when_cancelled(
    make_engine: MakeEngine,
) -> None:
    """Case 18 (vLLM)."""
    engine = make_engine(max_waiting=4)
    engine.add(prompt(9), 1)
    with pytest.raises(Overloaded) as refusal:
        engine.add_choices(prompt(1), 4)
    assert refusal.value.status == 429 and refusal.value.retry_after is not None
    assert engine.scheduler.stats().num_waiting == 1
    engine.run()
    ids = engine.add_choices(prompt(1), 4, max_tokens=9)
    assert ids == [2, 3, 4, 5]  # those refused have used up no number
    with pytest.raises(Overloaded):
        engine.add(prompt(2))
    for hopeless in (prompt(2, 256), ()):  # the limit of tokens is another one, and comes first
        with pytest.raises(InvalidRequest):
            engine.add(hopeless)
    with pytest.raises(InvalidRequest):  # five could not wait even in an empty queue
        engine.add_choices(prompt(1), 5)
    engine.step()
    engine.step()
    for seq_id in ids:
        engine.abort(seq_id)
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.held_pages) == (0, 0, 0)
    assert engine.add_choices(prompt(3), 4) == [6, 7, 8, 9]


def test_ranks_that_run_the_same_plans_hold_the_same_pages_that_the_scheduler_means(
    make_engine: MakeEngine,
) -> None:
    """Case 40 (SGLang)."""
    engine = make_engine(num_pages=12, num_host_pages=30)
    ranks = [FakeRank(page_size=4) for _ in range(2)]
    tables = [
        SequenceTable(
            page_size=4, pages=PageCounts(12), host_pages=PageCounts(30), max_model_len=256
        )
        for _ in range(2)
    ]
    for rank in ranks:
        rank.allocate(PageCounts(12), PageCounts(30))
    for salt in (0, 1, 2, 3, 1, 0, 2, 3):
        engine.add(prompt(salt, 9 + salt), 16, priority=salt == 3)
        engine.add_choices(prompt(salt, 11), 2, max_tokens=5)
    digest = GENESIS
    while not engine.is_idle:
        plan = engine.begin_step()
        assert plan is not None
        meant = {r.seq_id: r.pages for r in engine.scheduler._running.all()}
        frame, digest = encode_plan(plan, digest)
        answers = [rank.step(frame).output for rank in ranks]
        assert answers[0] == answers[1]
        given = [table.apply(plan) for table in tables]
        assert given[0] == given[1]
        for seq_id, pages in meant.items():
            assert tables[0][seq_id].pages == tables[1][seq_id].pages == array("i", pages)
        engine.end_step()
    stats = engine.scheduler.stats()
    assert (
        min(stats.counters.saved_pages, stats.counters.restored_pages, stats.counters.preemptions)
        > 0
    )


def test_what_happens_between_two_steps_gives_one_plan_in_whatever_order_it_comes(
    make_engine: MakeEngine,
) -> None:
    """Case 44 (tokenspeed)."""

    def chain(order: tuple[int, ...]) -> bytes:
        engine = make_engine(loads_at_once=False, num_slots=3, num_pages=20)
        for salt, adapter in enumerate(("A", "B", "C", BASE, "A", BASE)):
            engine.add(prompt(salt), 9, adapter)
        engine.step()
        digests = [load.adapter for load in engine.loads]
        assert digests == ["A", "B", "C"]
        engine.loads.sort(key=lambda load: order[digests.index(load.adapter)])
        while engine.loads:
            engine.finish_load()
        for waiting in (1, 2, 5):  # some leave before they have run
            engine.abort((1, 2, 5)[order[(1, 2, 5).index(waiting)]])
        engine.add(prompt(7), 2, "D")  # A and B are idle: one of them makes room
        while not engine.is_idle:
            engine.step()
            while engine.loads:
                engine.finish_load()
        assert [slot.adapter for slot in engine.scheduler.stats().slots] == ["D", "B", "C"]
        return engine.digest

    assert len({chain(order) for order in permutations(range(3))}) == 1


def test_of_equals_the_first_to_arrive_goes_first(make_engine: MakeEngine) -> None:
    """Case 44 (tokenspeed), the tie."""
    for fairness in (False, True):
        engine = make_engine(fairness=fairness, max_running=1)
        for salt in range(5):
            engine.add(prompt(salt), 1, tenant=str(9 - salt))
        engine.run()
        assert starts_of(engine) == [1, 2, 3, 4, 5]
