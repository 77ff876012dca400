"""Shares of the work by tenant, adapter and weight."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequest, Overloaded
from cluster.request import BASE
from cluster.scheduler.request_queue import MAX_IDLE, Fairness
from cluster.scheduler.testing.fake_engine import FakeEngine


def test_a_flow_that_was_idle_gets_no_credit_for_its_silence() -> None:
    shares = Fairness(enabled=True)
    busy = shares.enter("busy", BASE, 0, 1)
    shares.charge(busy, 900)
    shares.admitted(busy)
    at_last_admission = busy.share.counter
    shares.charge(busy, 100)
    assert shares.enter("late", BASE, 0, 1).share.counter == at_last_admission > 0


def test_an_adapter_that_was_idle_gets_no_credit_among_those_of_its_tenant() -> None:
    shares = Fairness(enabled=True)
    busy = shares.enter("a", "A", 0, 3)
    shares.charge(busy, 900)
    shares.admitted(busy)
    assert shares.enter("a", "B", 0, 3).counter == busy.counter > 0


def test_a_flow_that_leaves_ahead_of_the_others_keeps_its_debt() -> None:
    shares = Fairness(enabled=True)
    other = shares.enter("other", BASE, 0, 1)
    greedy = shares.enter("greedy", BASE, 0, 1)
    shares.charge(greedy, 500)
    debt = greedy.share.counter
    shares.leave(greedy)
    assert shares.enter("greedy", BASE, 0, 1).share.counter == debt > other.share.counter


def test_when_nobody_of_a_priority_is_left_all_is_forgotten() -> None:
    shares = Fairness(enabled=True)
    flow = shares.enter("a", BASE, 7, 1)
    shares.charge(flow, 500)
    shares.leave(flow)
    assert shares.enter("a", BASE, 7, 1).share.counter == 0


def test_twice_the_weight_is_half_the_charge() -> None:
    shares = Fairness(enabled=True)
    light, heavy = shares.enter("light", BASE, 0, 1), shares.enter("heavy", BASE, 0, 2)
    shares.charge(light, 10)
    shares.charge(heavy, 20)
    assert light.share.counter == heavy.share.counter > 0


def test_switched_off_nothing_is_charged() -> None:
    shares = Fairness(enabled=False)
    flow = shares.enter("a", BASE, 0, 1)
    shares.charge(flow, 10)
    assert flow.counter == flow.share.counter == 0


def _order_of_starts(engine: FakeEngine) -> list[int]:
    return [start.seq_id for plan in engine.plans for start in plan.starts]


def test_a_tenant_with_a_long_queue_does_not_hold_up_one_that_comes_later(
    make_engine: Callable[..., FakeEngine],
) -> None:
    engine = make_engine(fairness=True, max_running=1)
    hot = [engine.add((1, 2, i), 4, tenant="hot") for i in range(6)]
    engine.step()
    cold = engine.add((5, 6, 7), 4, tenant="cold")
    engine.run()
    order = _order_of_starts(engine)
    assert order.index(cold) == 1
    assert [seq_id for seq_id in order if seq_id != cold] == hot


def test_first_come_first_served_when_fairness_is_off(
    make_engine: Callable[..., FakeEngine],
) -> None:
    engine = make_engine(fairness=False, max_running=1)
    hot = [engine.add((1, 2, i), 4, tenant="hot") for i in range(6)]
    engine.step()
    cold = engine.add((5, 6, 7), 4, tenant="cold")
    engine.run()
    assert _order_of_starts(engine) == [*hot, cold]


@pytest.mark.parametrize(("weights", "shares"), [((1, 1), (8, 8)), ((1, 3), (4, 12))])
def test_admissions_follow_the_weights_while_all_tenants_wait(
    make_engine: Callable[..., FakeEngine], weights: tuple[int, int], shares: tuple[int, int]
) -> None:
    engine = make_engine(fairness=True, max_running=1, max_waiting=64)
    owner: dict[int, int] = {}
    for i in range(20):
        for tenant, weight in enumerate(weights):
            seq_id = engine.add((9, i, tenant), 4, tenant=str(tenant), weight=weight)
            owner[seq_id] = tenant
    while len(_order_of_starts(engine)) < 16:
        engine.step()
    served = Counter(owner[seq_id] for seq_id in _order_of_starts(engine)[:16])
    assert abs(served[0] - shares[0]) <= 1
    assert abs(served[1] - shares[1]) <= 1


def test_adapters_of_one_tenant_share_too(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine(fairness=True, max_running=1)
    for i in range(5):
        engine.add((1, 2, i), 4, "A")
    engine.step()
    engine.step()
    last = engine.add((1, 2, 3), 4, "B")
    engine.run()
    assert _order_of_starts(engine).index(last) <= 2


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(1, 40)),
        min_size=1,
        max_size=60,
    )
)
def test_no_backlogged_flow_falls_behind_another_by_more_than_one_request_each(
    requests: list[tuple[str, int, int]],
) -> None:
    """The bound of virtual token counters: normalised service differs by the largest request."""
    shares = Fairness(enabled=True)
    weights = {name: weight for name, weight, _ in requests}
    flows = {name: shares.enter(name, BASE, 0, weight) for name, weight in weights.items()}
    largest = max(cost for _, _, cost in requests)
    for _, _, cost in requests:
        flow = min(flows.values(), key=lambda f: (f.share.counter, f.tenant))
        shares.admitted(flow)
        shares.charge(flow, cost)
        counters = [f.share.counter for f in flows.values()]
        assert max(counters) - min(counters) <= largest * 2**20


def test_thousands_of_tenants_that_came_once_leave_no_more_flows_than_the_bound() -> None:
    shares = Fairness(enabled=True)
    busy = shares.enter("busy", BASE, 0, 1)
    for number in range(3 * MAX_IDLE):
        flow = shares.enter(f"tenant {number}", BASE, 0, 1)
        shares.admitted(flow)
        shares.charge(flow, 100 + number)
        shares.leave(flow)
    (peers,) = shares._classes.values()
    assert len(peers.by_key) <= MAX_IDLE + 1 and len(peers.idle) <= MAX_IDLE
    assert busy.num_live == 1
    # Those that are most ahead are remembered, the others begin anew.
    last = 3 * MAX_IDLE - 1
    assert shares.enter(f"tenant {last}", BASE, 0, 1).share.counter > 0
    assert shares.enter("tenant 0", BASE, 0, 1).share.counter == 0


def test_thousands_of_adapters_that_came_once_leave_no_more_flows_than_the_bound() -> None:
    shares = Fairness(enabled=True)
    busy = shares.enter("a", BASE, 0, 1)
    for number in range(3 * MAX_IDLE):
        flow = shares.enter("a", f"adapter {number}", 0, 1)
        shares.charge(flow, 100 + number)
        shares.leave(flow)
    flows = busy.share.flows
    assert len(flows.by_key) <= MAX_IDLE + 1 and len(flows.idle) <= MAX_IDLE
    shares.leave(busy)
    assert not busy.share.flows.by_key


def test_a_tenant_that_comes_and_goes_without_a_turn_leaves_one_entry() -> None:
    shares = Fairness(enabled=True)
    shares.enter("busy", BASE, 0, 1)
    flow = shares.enter("restless", BASE, 0, 1)
    shares.charge(flow, 5)
    for _ in range(100):
        shares.leave(flow)
        flow = shares.enter("restless", BASE, 0, 1)
    (peers,) = shares._classes.values()
    assert len(peers.idle) == 1


def test_a_flow_is_forgotten_once_its_counter_has_been_reached() -> None:
    shares = Fairness(enabled=True)
    brief, long = shares.enter("brief", BASE, 0, 1), shares.enter("long", BASE, 0, 1)
    shares.charge(brief, 10)
    shares.leave(brief)
    shares.charge(long, 11)
    shares.admitted(long)
    (peers,) = shares._classes.values()
    assert list(peers.by_key) == ["long"] and peers.idle == []


def test_many_adapters_are_no_larger_share(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine(fairness=True, max_running=1, num_slots=4, max_waiting=64)
    many = {engine.add((1, 2, i), 4, "ABCD"[i % 4], tenant="many") for i in range(12)}
    one = {engine.add((5, 6, i), 4, tenant="one") for i in range(12)}
    while len(_order_of_starts(engine)) < 12:
        engine.step()
    started = set(_order_of_starts(engine)[:12])
    assert abs(len(started & many) - len(started & one)) <= 2


def test_a_tenant_that_fills_the_queue_leaves_room_for_the_next_one(
    make_engine: Callable[..., FakeEngine],
) -> None:
    engine = make_engine(fairness=True, max_running=1, max_waiting=18)
    hot = [engine.add((1, 2, i), 4, tenant="hot") for i in range(16)]
    with pytest.raises(Overloaded, match="of this tenant"):
        engine.add((1, 2, 99), 4, tenant="hot")
    engine.add((5, 6, 0), 4, tenant="cold")
    with pytest.raises(Overloaded, match="of this tenant"):
        engine.add((5, 6, 9), 4, tenant="cold")
    for seq_id in hot[:2]:
        engine.abort(seq_id)
    engine.add((5, 6, 9), 4, tenant="cold")
    with pytest.raises(Overloaded, match="of this tenant"):
        engine.add((1, 2, 99), 4, tenant="hot")
    engine.add((7, 8, 9), 4, tenant="a third one")


def test_places_in_the_queue_follow_the_weights(make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine(fairness=True, max_running=1, max_waiting=90)
    numbers = iter(range(1000))
    waiting: dict[int, list[int]] = {1: [], 3: []}
    for turn in range(300):
        for weight, seq_ids in waiting.items():
            with pytest.raises(Overloaded, match="of this tenant"):
                while True:
                    prompt = (1, 2, next(numbers))
                    seq_ids.append(engine.add(prompt, 4, tenant=f"{weight}", weight=weight))
        leaving = waiting[(1, 3)[turn % 2]]
        if len(leaving) > 1:
            engine.abort(leaving.pop())
    assert abs(len(waiting[1]) - 20) <= 1 and abs(len(waiting[3]) - 60) <= 1


def test_choices_that_are_held_count_for_their_tenant(
    make_engine: Callable[..., FakeEngine],
) -> None:
    engine = make_engine(fairness=True, max_running=1, max_waiting=9)
    engine.add_choices((1, 2, 3), 6, max_tokens=4, tenant="hot")
    with pytest.raises(Overloaded, match="of this tenant"):
        engine.add_choices((1, 2, 4), 3, max_tokens=4, tenant="hot")
    with pytest.raises(InvalidRequest, match="may ever wait, 8"):
        engine.add_choices((1, 2, 4), 9, max_tokens=4, tenant="cold")


def test_sequences_that_run_leave_their_places_in_the_queue(
    make_engine: Callable[..., FakeEngine],
) -> None:
    engine = make_engine(fairness=True, max_running=2, max_waiting=9)
    engine.add_choices((1, 2, 3), 8, max_tokens=4, tenant="hot")
    engine.run()
    engine.add_choices((1, 2, 4), 8, max_tokens=4, tenant="hot")


@pytest.mark.parametrize(("fairness", "tenant"), [(False, "hot"), (True, "")])
def test_without_fairness_or_keys_all_of_the_queue_can_be_taken(
    make_engine: Callable[..., FakeEngine], fairness: bool, tenant: str
) -> None:
    engine = make_engine(fairness=fairness, max_running=1, max_waiting=4)
    for i in range(4):
        engine.add((1, 2, i), 4, tenant=tenant)
    with pytest.raises(Overloaded, match="of 4 requests that may"):
        engine.add((1, 2, 9), 4, tenant=tenant)
