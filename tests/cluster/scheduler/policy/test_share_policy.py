"""Seats and pages by share: who gives way to a tenant that has less than its share."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]


def holders(engine: FakeEngine) -> Counter[str]:
    """Return how many seats each tenant has."""
    running = engine.scheduler._running.by_id.values()
    return Counter(one.sequence.request.tenant for one in running)


def fill(engine: FakeEngine, tenant: str, count: int, length: int = 40, weight: int = 1) -> None:
    for i in range(count):
        engine.add((1, 2, i), length, tenant=tenant, weight=weight)


def test_a_tenant_that_comes_late_gets_its_seats_in_the_next_step(make_engine: MakeEngine) -> None:
    engine = make_engine(fairness=True, max_running=4, num_pages=200)
    fill(engine, "hot", 8)
    for _ in range(5):
        engine.step()
    assert holders(engine) == {"hot": 4}
    fill(engine, "cold", 3)
    engine.step()
    assert holders(engine) == {"hot": 2, "cold": 2}
    assert engine.scheduler.stats().counters.share_preemptions == 2
    engine.run()
    for seq_id, number in ((1, 0), (4, 3), (8, 7)):
        assert engine.tokens(seq_id) == fake_continuation(None, (1, 2, number), 40)


def test_nobody_gives_way_where_nobody_else_waits_or_fairness_is_off(
    make_engine: MakeEngine,
) -> None:
    for fairness, others in ((True, 0), (False, 3)):
        engine = make_engine(fairness=fairness, max_running=4, num_pages=200)
        fill(engine, "hot", 8)
        engine.step()
        fill(engine, "cold", others)
        engine.run()
        assert engine.scheduler.stats().counters.share_preemptions == 0


def test_seats_follow_the_weights(make_engine: MakeEngine) -> None:
    engine = make_engine(fairness=True, max_running=8, num_pages=400, max_waiting=64)
    fill(engine, "light", 16)
    engine.step()
    fill(engine, "heavy", 16, weight=3)
    for _ in range(4):
        engine.step()
    assert holders(engine) == {"light": 2, "heavy": 6}


def test_work_of_a_higher_priority_does_not_give_way(make_engine: MakeEngine) -> None:
    engine = make_engine(fairness=True, max_running=4, num_pages=200)
    for i in range(4):
        engine.add((1, 2, i), 40, tenant="hot", priority=-1)
    engine.step()
    fill(engine, "cold", 2)
    engine.step()
    assert holders(engine) == {"hot": 4}


def test_pages_that_are_more_than_a_share_are_taken_back(make_engine: MakeEngine) -> None:
    engine = make_engine(fairness=True, max_running=8, num_pages=24)
    page_size = engine.scheduler.config.page_size
    for i in range(4):
        engine.add(tuple(range(100 * i, 100 * i + 5 * page_size)), 30, tenant="hot")
    for _ in range(12):
        engine.step()
    late = engine.add(tuple(range(900, 900 + 6 * page_size)), 2, tenant="cold")
    for _ in range(3):
        engine.step()
    assert engine.scheduler.stats().counters.share_preemptions > 0
    assert engine.finish_reason(late) == "length" or late in engine.scheduler._running.by_id
    engine.run()


def test_a_long_prompt_does_not_hold_up_another_tenants_first_token(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(fairness=True, num_pages=400, token_budget=24, max_running=8)
    engine.add(tuple(range(240)), 1, tenant="hot")
    for _ in range(3):
        engine.step()
    late = engine.add((7, 8, 9), 1, tenant="cold")
    engine.step()
    assert engine.finish_reason(late) == "length"


@given(
    seats=st.integers(1, 6),
    arrivals=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 12), st.integers(0, 3)), max_size=24
    ),
)
@pytest.mark.parametrize("weights", [{}, {"a": 3, "b": 2}])
def test_whatever_comes_no_tenant_within_its_share_loses_a_seat_and_all_end_right(
    seats: int, arrivals: list[tuple[str, int, int]], weights: dict[str, int]
) -> None:
    config = SchedulerConfig(
        base_digest="b", num_pages=300, page_size=4, max_model_len=64, num_slots=0,
        max_running=seats, token_budget=32, max_chunk=16, max_waiting=100,
    )  # fmt: skip
    engine = FakeEngine(config)
    asked: dict[int, tuple[tuple[int, ...], int]] = {}
    tenants: dict[int, str] = {}
    for number, (tenant, length, num_steps) in enumerate(arrivals):
        prompt = (number, 1, 2)
        seq_id = engine.add(prompt, length, tenant=tenant, weight=weights.get(tenant, 1))
        asked[seq_id], tenants[seq_id] = (prompt, length), tenant
        for _ in range(num_steps):
            before = holders(engine)
            preempted = engine.scheduler.stats().counters.share_preemptions
            live = engine.scheduler._fairness.tenants.weights()
            engine.step()
            if engine.scheduler.stats().counters.share_preemptions > preempted:
                started = (start.seq_id for start in engine.plans[-1].starts)
                held = before + Counter(tenants[seq_id] for seq_id in started)
                over = [t for t in held if held[t] * sum(live.values()) > seats * live[t]]
                assert over, (held, live)
    engine.run()
    for seq_id, (prompt, length) in asked.items():
        assert engine.tokens(seq_id) == fake_continuation(None, prompt, length)
