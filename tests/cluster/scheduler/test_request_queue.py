"""Whose turn it is among those that wait."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.request import BASE
from cluster.scheduler.request_queue import Flow, RequestQueue, TenantShare
from cluster.tenancy.shared_room import SharedRoom


def flow_of(tenant: str, adapter: str, priority: int) -> Flow:
    return Flow(adapter, share=TenantShare(tenant, priority=priority))


def test_the_oldest_of_all_open_lanes_is_first() -> None:
    queue, a, base = RequestQueue(SharedRoom(64)), flow_of("", "A", 0), flow_of("", BASE, 0)
    for seq_id, flow in ((1, a), (2, base), (3, a)):
        queue.push(seq_id, flow)
    assert queue.first() == 2
    assert queue.num_shut == 2
    queue.open("A")
    assert queue.first() == 1
    queue.remove(1, a)
    assert queue.first() == 2
    queue.shut("A")
    queue.remove(2, base)
    assert queue.first() is None
    assert queue.lane("A") == (3,)


def test_a_sequence_that_returns_takes_its_arrival_place() -> None:
    queue, flow = RequestQueue(SharedRoom(64)), flow_of("", BASE, 0)
    queue.push(5, flow)
    queue.push(7, flow)
    queue.push(2, flow)
    assert queue.lane(BASE) == (2, 5, 7)
    assert queue.first() == 2


def test_a_smaller_priority_number_goes_first_whenever_it_came() -> None:
    queue = RequestQueue(SharedRoom(64))
    queue.push(1, flow_of("", BASE, 0))
    queue.push(2, flow_of("", BASE, -3))
    queue.push(3, flow_of("", BASE, 5))
    assert queue.first() == 2
    assert queue.priority(BASE) == -3


def test_a_flow_that_is_charged_falls_behind_the_others_of_its_priority() -> None:
    queue, busy, quiet = (
        RequestQueue(SharedRoom(64)),
        flow_of("busy", BASE, 0),
        flow_of("quiet", BASE, 0),
    )
    queue.push(1, busy)
    queue.push(2, quiet)
    assert queue.first() == 1
    busy.share.counter += 10
    queue.charged(busy)
    assert queue.first() == 2
    quiet.share.counter += 20
    queue.charged(quiet)
    assert queue.first() == 1


def test_the_adapters_of_the_tenant_whose_turn_it_is_compete_as_equals() -> None:
    share, other = TenantShare("a", counter=5), flow_of("b", BASE, 0)
    first, second = Flow(BASE, share=share), Flow("A", share=share)
    queue, other.share.counter = RequestQueue(SharedRoom(64)), 6
    queue.open("A")
    for seq_id, flow in ((1, first), (2, second), (3, other)):
        queue.push(seq_id, flow)
    first.counter = 100
    queue.charged(first)
    assert queue.first() == 2  # of the same tenant, however far ahead the other adapter is
    share.counter = 7
    queue.charged(second)
    assert queue.first() == 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "remove", "open", "shut", "charge"]),
            st.integers(0, 40),
        )
    )
)
def test_any_mix_of_calls_keeps_the_first_right(calls: list[tuple[str, int]]) -> None:
    queue = RequestQueue(SharedRoom(64))
    shares = [TenantShare(tenant, priority=p) for tenant in "xy" for p in (0, 1)]
    flows = [Flow(adapter, share=share) for share in shares for adapter in "ABC"]
    model: dict[int, Flow] = {}
    for verb, number in calls:
        flow = flows[number % len(flows)]
        if verb == "open":
            queue.open(flow.adapter)
        elif verb == "shut":
            queue.shut(flow.adapter)
        elif verb == "charge":
            flow.counter += number
            flow.share.counter += number // 2
            queue.charged(flow)
        elif verb == "remove" and number in model:
            queue.remove(number, model.pop(number))
        elif verb == "push" and number not in model:
            queue.push(number, flow)
            model[number] = flow
        opened = [(f, n) for n, f in model.items() if queue.is_open(f.adapter)]
        # The head of each tenant, and the tenant whose turn it is.
        heads: dict[TenantShare, tuple[int, int]] = {}
        for f, n in opened:
            heads[f.share] = min(heads.get(f.share, (f.counter, n)), (f.counter, n))
        places = [(share.priority, share.counter, head[1]) for share, head in heads.items()]
        assert queue.first() == min(places, default=(0, 0, None))[2]
        assert queue.num_shut == len(model) - len(opened)
        assert len(queue) == len(model)


def test_flows_that_are_charged_while_nobody_is_asked_for_are_noted_once() -> None:
    queue, flow = RequestQueue(SharedRoom(64)), flow_of("", BASE, 0)
    queue.push(1, flow)
    for _ in range(500):
        flow.share.counter += 1
        queue.charged(flow)
    assert len(queue._moved) == 1
    assert queue.first() == 1 and not queue._moved


def test_the_priority_of_a_lane_is_that_of_its_foremost_flow() -> None:
    queue, low, high = RequestQueue(SharedRoom(64)), flow_of("a", "A", 5), flow_of("b", "A", -2)
    queue.push(1, low)
    queue.push(2, high)
    queue.push(3, high)
    assert queue.priority("A") == -2
    queue.remove(2, high)
    assert queue.priority("A") == -2
    queue.remove(3, high)
    assert queue.priority("A") == 5
