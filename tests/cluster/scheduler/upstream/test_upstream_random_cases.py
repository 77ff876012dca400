"""What another engine tests with random work of all priorities, told of ours.

Each test names the case that it is.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.request import BASE
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from worker.testing.fake_rank import fake_continuation


def prompt(salt: int, length: int) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


requests = st.tuples(
    st.integers(0, 3),  # salt of the prompt
    st.integers(1, 14),  # its length
    st.integers(1, 10),  # of the answer
    st.sampled_from([BASE, "A", "B", "C"]),
    st.integers(-1, 2),  # priority
    st.integers(0, 3),  # steps before the next request
)


@settings(deadline=None)
@given(
    work=st.lists(requests, min_size=1, max_size=14),
    num_pages=st.integers(7, 14),
    num_host_pages=st.sampled_from([0, 8]),
    num_slots=st.integers(1, 2),
    fairness=st.booleans(),
)
def test_whatever_comes_all_are_served_with_their_own_tokens_and_nothing_is_left_over(
    work: list[tuple[int, int, int, str, int, int]],
    num_pages: int,
    num_host_pages: int,
    num_slots: int,
    fairness: bool,
) -> None:
    """Case 16 (vLLM)."""
    config = tiny_config(
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        num_slots=num_slots,
        max_running=3,
        token_budget=10,
        max_chunk=8,
        slot_patience=3,
        drain_steps=2,
        fairness=fairness,
    )
    engine = FakeEngine(config)
    expected = {}
    for salt, length, max_tokens, adapter, priority, num_steps in work:
        tokens = prompt(salt, length)
        seq_id = engine.add(tokens, max_tokens, adapter, priority=priority, tenant=str(length))
        digest = None if adapter == BASE else adapter
        expected[seq_id] = fake_continuation(digest, tokens, max_tokens)
        for _ in range(num_steps):
            engine.step()
            assert engine.scheduler.stats().num_running <= 3
    engine.run()
    assert {seq_id: engine.tokens(seq_id) for seq_id in expected} == expected
    stats = engine.scheduler.stats()
    assert stats.free_pages + stats.cached_pages == num_pages
    assert stats.free_host_pages + stats.cached_host_pages == num_host_pages
    assert all(slot.leases == 0 for slot in stats.slots)


@settings(deadline=None)
@given(work=st.lists(requests, min_size=2, max_size=14), num_pages=st.integers(7, 12))
def test_nobody_runs_past_one_of_higher_priority_that_had_to_give_way(
    work: list[tuple[int, int, int, str, int, int]], num_pages: int
) -> None:
    """Case 16 (vLLM), the order of the base model's requests."""
    config = tiny_config(num_pages=num_pages, max_running=4, token_budget=12, max_chunk=8)
    engine = FakeEngine(config)
    order = {}
    for salt, length, max_tokens, _, priority, num_steps in work:
        seq_id = engine.add(prompt(salt, length), max_tokens, priority=priority)
        order[seq_id] = (priority, seq_id)
        for _ in range(num_steps):
            _step_in_order(engine, order)
    while not engine.is_idle:
        _step_in_order(engine, order)


def _step_in_order(engine: FakeEngine, order: dict[int, tuple[int, int]]) -> None:
    plan = engine.begin_step()
    if plan is None:
        return
    victims = [end for end in plan.ends if engine.finish_reason(end) is None]
    computed = [chunk.seq_id for chunk in plan.chunks]
    for victim in victims:
        if victim not in computed:
            assert all(order[seq_id] < order[victim] for seq_id in computed)
    started = [order[start.seq_id] for start in plan.starts]
    assert started == sorted(started)
    engine.end_step()
