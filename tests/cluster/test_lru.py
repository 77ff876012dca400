"""The one eviction order."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.lru import Lru


def test_the_least_recently_used_goes_first_and_ties_go_by_number() -> None:
    lru: Lru[str] = Lru()
    lru.add(7, 1, "later")
    lru.add(3, 9, "tie, larger number")
    lru.add(3, 2, "tie, smaller number")
    assert list(lru) == ["tie, smaller number", "tie, larger number", "later"]
    assert [lru.pop() for _ in range(3)] == ["tie, smaller number", "tie, larger number", "later"]
    assert len(lru) == 0


def test_a_thing_that_was_kept_and_used_again_goes_in_its_new_turn() -> None:
    lru: Lru[str] = Lru()
    lru.add(1, 1, "a")
    lru.add(2, 2, "b")
    lru.remove(1)
    assert 1 not in lru
    lru.add(5, 1, "a")
    assert [lru.pop(), lru.pop()] == ["b", "a"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=400))
def test_any_mix_of_uses_pops_like_a_sorted_list(uses: list[tuple[int, int]]) -> None:
    lru: Lru[int] = Lru()
    model: dict[int, int] = {}
    for number, step in uses:
        if number in model:
            lru.remove(number)
            del model[number]
        else:
            lru.add(step, number, number)
            model[number] = step
    expected = sorted(model, key=lambda number: (model[number], number))
    assert [lru.pop() for _ in expected] == expected


def test_stale_entries_do_not_pile_up() -> None:
    lru: Lru[int] = Lru()
    for step in range(10_000):
        lru.add(step, 1, 1)
        lru.remove(1)
    assert len(lru._heap) + len(lru._unswept) < 200


def test_what_is_evictable_stays_so_in_the_midst_of_a_sweep() -> None:
    lru: Lru[int] = Lru()
    for number in range(100):
        lru.add(number, number, number)
    step = 100
    while not lru._unswept:
        step += 1
        lru.remove(50)
        lru.add(step, 50, 50)
    assert [lru.pop() for _ in range(100)] == [*range(50), *range(51, 100), 50]
    assert len(lru) == 0
