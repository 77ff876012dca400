"""Arrival order in lanes."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.request import BASE
from cluster.scheduling.waiting_queue import WaitingQueue


def test_the_oldest_of_all_open_lanes_is_first() -> None:
    queue = WaitingQueue()
    for seq_id, adapter in ((1, "A"), (2, BASE), (3, "A")):
        queue.push(seq_id, adapter)
    assert queue.first() == 2
    assert queue.num_shut == 2
    queue.open("A")
    assert queue.first() == 1
    queue.remove(1, "A")
    assert queue.first() == 2
    queue.shut("A")
    queue.remove(2, BASE)
    assert queue.first() is None
    assert queue.lane("A") == (3,)


def test_a_sequence_that_returns_takes_its_arrival_place() -> None:
    queue = WaitingQueue()
    queue.push(5, BASE)
    queue.push(7, BASE)
    queue.push(2, BASE)
    assert queue.lane(BASE) == (2, 5, 7)
    assert queue.first() == 2


@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "open", "shut"]), st.integers(0, 30))))
def test_any_mix_of_calls_keeps_the_first_right(calls: list[tuple[str, int]]) -> None:
    queue = WaitingQueue()
    model: dict[int, str] = {}
    for verb, number in calls:
        adapter = "ABC"[number % 3]
        if verb == "open":
            queue.open(adapter)
        elif verb == "shut":
            queue.shut(adapter)
        elif number in model:
            queue.remove(number, model.pop(number))
        else:
            queue.push(number, adapter)
            model[number] = adapter
        opened = [n for n, a in model.items() if queue.is_open(a)]
        assert queue.first() == min(opened, default=None)
        assert queue.num_shut == len(model) - len(opened)
        assert len(queue) == len(model)
