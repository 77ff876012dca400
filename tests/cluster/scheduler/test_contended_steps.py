"""Steps that several tenants share: prompts of those who have had less come soon, and alone."""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.planner import OVER_PART
from cluster.scheduler.tenants import LATELY, MAX_LATELY, Tenants
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from worker.protocol import Plan
from worker.testing.fake_rank import fake_continuation


def engine_of(*, plans_ahead: bool = False, **changes: int) -> FakeEngine:
    config = tiny_config(fairness=True, num_pages=400, **changes)
    return FakeEngine(config, plans_ahead=plans_ahead)


def fill(engine: FakeEngine, tenant: str, count: int, length: int = 40) -> list[int]:
    return [engine.add((1, 2, i), length, tenant=tenant) for i in range(count)]


def plan_that_starts(engine: FakeEngine, seq_id: int) -> int:
    """Return the place among the plans of the one that a sequence starts in."""
    (place,) = (
        place
        for place, plan in enumerate(engine.plans)
        if seq_id in [start.seq_id for start in plan.starts]
    )
    return place


def who(plan: Plan) -> list[int]:
    return [chunk.seq_id for chunk in plan.chunks]


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_prompt_of_who_has_had_less_has_a_step_of_its_own_and_the_others_the_next(
    plans_ahead: bool,
) -> None:
    engine = engine_of(plans_ahead=plans_ahead)
    hot = fill(engine, "hot", 6)
    for _ in range(5):
        engine.step()
    cold = engine.add((7, 8, 9), 4, tenant="cold")
    engine.run()
    place = plan_that_starts(engine, cold)
    assert who(engine.plans[place]) == [cold]
    assert set(who(engine.plans[place + 1])) == {*hot, cold}
    assert engine.scheduler.stats().counters.share_deferrals == 1
    for i, seq_id in enumerate(hot):
        assert engine.tokens(seq_id) == fake_continuation(None, (1, 2, i), 40)


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_seat_is_free_in_time_whether_steps_are_planned_ahead_or_not(plans_ahead: bool) -> None:
    engine = engine_of(plans_ahead=plans_ahead, max_running=4)
    fill(engine, "hot", 8)
    for _ in range(5):
        engine.step()
    num_plans = len(engine.plans)
    cold = engine.add((7, 8, 9), 4, tenant="cold")
    for _ in range(3):
        engine.step()
    assert plan_that_starts(engine, cold) == num_plans
    engine.run()


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_pages_are_free_in_time_whether_steps_are_planned_ahead_or_not(plans_ahead: bool) -> None:
    engine = FakeEngine(tiny_config(fairness=True, num_pages=24), plans_ahead=plans_ahead)
    for i in range(4):
        engine.add(tuple(range(100 * i, 100 * i + 20)), 30, tenant="hot")
    for _ in range(8):
        engine.step()
    num_plans = len(engine.plans)
    cold = engine.add(tuple(range(900, 920)), 2, tenant="cold")
    for _ in range(3):
        engine.step()
    assert plan_that_starts(engine, cold) <= num_plans + 1
    engine.run()


def test_who_runs_no_more_than_its_share_is_left_out_of_no_step() -> None:
    engine = engine_of()
    hot, mild = fill(engine, "hot", 5), fill(engine, "mild", 1)
    for _ in range(5):
        engine.step()
    cold = engine.add((7, 8, 9), 4, tenant="cold")
    engine.run()
    assert who(engine.plans[plan_that_starts(engine, cold)]) == [cold, *mild]
    assert engine.tokens(hot[0]) == fake_continuation(None, (1, 2, 0), 40)


def test_of_two_tenants_with_one_answer_each_neither_waits_for_the_other() -> None:
    engine = engine_of()
    first = fill(engine, "a", 1)
    engine.step()
    second = engine.add((7, 8, 9), 4, tenant="b")
    engine.step()
    assert who(engine.plans[-1]) == [*first, second]


def test_who_has_had_more_is_not_put_before_those_that_run() -> None:
    engine = engine_of(max_chunk=8)
    greedy = engine.add(tuple(range(200)), 1, tenant="greedy")
    fill(engine, "hot", 3)
    while not engine.finish_reason(greedy):
        engine.step()
    again = engine.add((4, 5, 6), 1, tenant="greedy")
    engine.run()
    assert len(who(engine.plans[plan_that_starts(engine, again)])) == 4


def test_work_of_a_higher_priority_is_left_out_of_no_step() -> None:
    engine = engine_of()
    hot = [engine.add((1, 2, i), 20, tenant="hot", priority=-1) for i in range(5)]
    for _ in range(5):
        engine.step()
    cold = engine.add((7, 8, 9), 4, tenant="cold")
    engine.run()
    assert who(engine.plans[plan_that_starts(engine, cold)]) == [*hot, cold]


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_however_many_tenants_come_one_after_the_other_who_runs_has_every_other_step(
    plans_ahead: bool,
) -> None:
    engine = engine_of(plans_ahead=plans_ahead)
    hot = fill(engine, "hot", 3, length=60)
    for _ in range(3):
        engine.step()
    num_plans = len(engine.plans)
    for number in range(40):
        engine.add((number, 7), 1, tenant=f"tenant {number}")
        engine.step()
    later = engine.plans[num_plans:-1]
    assert sum(hot[0] in who(plan) for plan in later) >= len(later) // 2
    assert engine.scheduler.stats().counters.share_deferrals >= 10
    engine.run()


def longest_chunk(plans: list[Plan], seq_ids: list[int]) -> int:
    return max(len(c.token_ids) for plan in plans for c in plan.chunks if c.seq_id in seq_ids)


def test_prompts_of_who_is_over_its_share_come_in_small_chunks_while_others_are_there_lately() -> (
    None
):
    engine = engine_of(max_running=8)
    cap = engine.scheduler.config.token_budget // OVER_PART
    fill(engine, "hot", 2, length=200)
    engine.step()
    engine.add((7, 8, 9), 1, tenant="cold")
    engine.step()
    engine.step()
    num_plans = len(engine.plans)
    long = [engine.add(tuple(range(n, n + 30)), 1, tenant="hot") for n in (100, 200)]
    while not all(engine.finish_reason(one) for one in long):
        engine.step()
    plans = engine.plans[num_plans:]
    for plan in plans:
        assert sum(len(c.token_ids) for c in plan.chunks if c.seq_id in long) <= cap
    engine.run()
    fill(engine, "hot", 2, length=200)
    for _ in range(0, LATELY, 200):  # until nobody else was there lately
        fill(engine, "hot", 2, length=200)
        engine.run()
    fill(engine, "hot", 2, length=200)
    engine.step()
    alone = engine.add(tuple(range(300, 330)), 1, tenant="hot")
    engine.run()
    assert longest_chunk(engine.plans, [alone]) > cap


def test_a_tenant_that_was_there_lately_is_forgotten_after_some_steps() -> None:
    tenants = Tenants()
    tenants.enter("a", 2)
    tenants.enter("b", 1)
    tenants.leave("a")
    assert (tenants.weights(), tenants.contenders()) == ({"b": 1}, {"b": 1, "a": 2})
    tenants.step = LATELY
    assert tenants.contenders() == {"b": 1, "a": 2}
    tenants.step = LATELY + 1
    assert tenants.contenders() == {"b": 1}


def test_of_those_that_were_there_lately_few_are_remembered() -> None:
    tenants = Tenants()
    for number in range(1000):
        tenants.enter(f"t{number}", 1)
        tenants.leave(f"t{number}")
    assert len(tenants.contenders()) == MAX_LATELY
    assert "t999" in tenants.contenders()


@pytest.mark.grid("values")
@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize(("weights", "part"), [((1, 1), 1 / 2), ((1, 3), 1 / 4)])
def test_tokens_follow_weights_where_two_tenants_want_all_they_can_get(
    plans_ahead: bool, weights: tuple[int, int], part: float
) -> None:
    config = SchedulerConfig(
        base_digest="b", num_pages=400, page_size=4, max_model_len=64, num_slots=0,
        max_running=16, token_budget=48, max_chunk=16, max_waiting=200,
    )  # fmt: skip
    engine = FakeEngine(config, plans_ahead=plans_ahead)
    owner: dict[int, str] = {}
    live: dict[str, set[int]] = {"a": set(), "b": set()}
    tokens: Counter[str] = Counter()

    def refill() -> None:
        for tenant, weight in zip("ab", weights, strict=True):
            live[tenant] = {one for one in live[tenant] if not engine.finish_reason(one)}
            for _ in range(20 - len(live[tenant])):
                number = len(owner)
                seq_id = engine.add((number, 1, 2, 3, 4), 12, tenant=tenant, weight=weight)
                owner[seq_id] = tenant
                live[tenant].add(seq_id)

    for step in range(300):
        refill()
        engine.step()
        if step == 100:
            tokens = Counter()
            before = {seq_id: len(engine.tokens(seq_id)) for seq_id in owner}
    for seq_id, tenant in owner.items():
        tokens[tenant] += len(engine.tokens(seq_id)) - before.get(seq_id, 0)
    assert tokens["a"] / tokens.total() == pytest.approx(part, rel=0.05)


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(1, 10), st.integers(0, 3)),
        max_size=30,
    ),
    plans_ahead=st.booleans(),
)
@example(  # the second is preempted, which is another matter than a step that it is left out of
    arrivals=[
        *[("a", 1, 2, n) for n in (0, 1)],
        *[("c", 1, 2, 0)] * 2,
        *[("a", 1, 1, 0)] * 2,
        ("c", 1, 1, 0),
    ],
    plans_ahead=False,
)
def test_whatever_comes_nobody_who_draws_tokens_is_left_out_twice_in_a_row(
    arrivals: list[tuple[str, int, int, int]], plans_ahead: bool
) -> None:
    config = SchedulerConfig(
        base_digest="b", num_pages=300, page_size=4, max_model_len=64, num_slots=0,
        max_running=6, token_budget=24, max_chunk=16, max_waiting=100,
    )  # fmt: skip
    engine = FakeEngine(config, plans_ahead=plans_ahead)
    asked: dict[int, tuple[tuple[int, ...], int, str]] = {}
    for number, (tenant, size, length, num_steps) in enumerate(arrivals):
        prompt = (number, *range(size))
        asked[engine.add(prompt, length, tenant=tenant)] = (prompt, length, tenant)
        for _ in range(num_steps):
            engine.step()
    engine.run()
    for seq_id, (prompt, length, _) in asked.items():
        assert engine.tokens(seq_id) == fake_continuation(None, prompt, length)
    for seq_id in asked:
        places = left_out(engine, seq_id)
        assert not any(place + 1 in places for place in places)


def left_out(engine: FakeEngine, seq_id: int) -> list[int]:
    """Return the places of the plans that a sequence is not in though it has a token to draw."""
    places: list[int] = []
    is_decoding, since = False, 0
    for place, plan in enumerate(engine.plans):
        for chunk in plan.chunks:
            if chunk.seq_id == seq_id:
                is_preempted = seq_id in [start.seq_id for start in plan.starts]
                if is_decoding and not is_preempted:  # else it had no seat in between
                    places += range(since, place)
                is_decoding, since = chunk.samples, place + 1
    return places


@pytest.mark.parametrize("lately", [True, False])
def test_the_adapter_of_who_asks_now_and_then_stays_beside_one_that_asks_for_many(
    lately: bool,
) -> None:
    engine = FakeEngine(tiny_config(fairness=True, num_slots=4, num_pages=200))
    number = 0
    engine.add((1, 2), 2, "mine", tenant="small" if lately else "large")
    engine.run()
    for _ in range(12):
        for _ in range(6):
            number += 1
            engine.add((3, number), 6, f"many {number % 9}", tenant="large")
            engine.step()
        if lately:
            engine.add((1, 2, number), 2, "mine", tenant="small")
    engine.run()
    loads = [load.adapter for load in engine.begun]
    assert loads.count("mine") == 1
    assert len(loads) > 20
    assert ("mine" in engine.bank()) == lately


def test_where_nothing_runs_no_slot_is_kept_for_anybody() -> None:
    engine = FakeEngine(tiny_config(fairness=True, num_slots=1))
    engine.add((1, 2), 2, "mine", tenant="small")
    engine.run()
    other = engine.add((1, 2), 2, "other", tenant="large")
    engine.run()
    assert engine.finish_reason(other) == "length"
