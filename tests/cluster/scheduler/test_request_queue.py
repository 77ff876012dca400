"""Whose turn it is among those that wait."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.request import BASE
from cluster.scheduler.request_queue import Flow, RequestQueue


def test_the_oldest_of_all_open_lanes_is_first() -> None:
    queue, a, base = RequestQueue(), Flow("", "A", 0), Flow("", BASE, 0)
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
    queue, flow = RequestQueue(), Flow("", BASE, 0)
    queue.push(5, flow)
    queue.push(7, flow)
    queue.push(2, flow)
    assert queue.lane(BASE) == (2, 5, 7)
    assert queue.first() == 2


def test_a_smaller_priority_number_goes_first_whenever_it_came() -> None:
    queue = RequestQueue()
    queue.push(1, Flow("", BASE, 0))
    queue.push(2, Flow("", BASE, -3))
    queue.push(3, Flow("", BASE, 5))
    assert queue.first() == 2
    assert queue.priority(BASE) == -3


def test_a_flow_that_is_charged_falls_behind_the_others_of_its_priority() -> None:
    queue, busy, quiet = RequestQueue(), Flow("busy", BASE, 0), Flow("quiet", BASE, 0)
    queue.push(1, busy)
    queue.push(2, quiet)
    assert queue.first() == 1
    busy.counter += 10
    queue.charged(busy)
    assert queue.first() == 2
    quiet.counter += 20
    queue.charged(quiet)
    assert queue.first() == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "remove", "open", "shut", "charge"]),
            st.integers(0, 40),
        )
    )
)
def test_any_mix_of_calls_keeps_the_first_right(calls: list[tuple[str, int]]) -> None:
    queue = RequestQueue()
    flows = [Flow(tenant, adapter, p) for tenant in "xy" for adapter in "ABC" for p in (0, 1)]
    model: dict[int, Flow] = {}
    for verb, number in calls:
        flow = flows[number % len(flows)]
        if verb == "open":
            queue.open(flow.adapter)
        elif verb == "shut":
            queue.shut(flow.adapter)
        elif verb == "charge":
            flow.counter += number
            queue.charged(flow)
        elif verb == "remove" and number in model:
            queue.remove(number, model.pop(number))
        elif verb == "push" and number not in model:
            queue.push(number, flow)
            model[number] = flow
        opened = [(f.priority, f.counter, n) for n, f in model.items() if queue.is_open(f.adapter)]
        # Within a flow arrival decides, and a flow has one priority and counter.
        assert queue.first() == min(opened, default=(0, 0, None))[2]
        assert queue.num_shut == len(model) - len(opened)
        assert len(queue) == len(model)


def test_flows_that_are_charged_while_nobody_is_asked_for_are_noted_once() -> None:
    queue, flow = RequestQueue(), Flow("", BASE, 0)
    queue.push(1, flow)
    for _ in range(500):
        flow.counter += 1
        queue.charged(flow)
    assert len(queue._moved) == 1
    assert queue.first() == 1 and not queue._moved


def test_the_priority_of_a_lane_is_that_of_its_foremost_flow() -> None:
    queue, low, high = RequestQueue(), Flow("a", "A", 5), Flow("b", "A", -2)
    queue.push(1, low)
    queue.push(2, high)
    queue.push(3, high)
    assert queue.priority("A") == -2
    queue.remove(2, high)
    assert queue.priority("A") == -2
    queue.remove(3, high)
    assert queue.priority("A") == 5
