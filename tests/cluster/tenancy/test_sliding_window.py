"""A minute is a minute wherever it begins, and nothing is forgiven or lost."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.tenancy.sliding_window import LAST_AGE, SlidingWindow, slot_of


def test_what_was_spent_leaves_the_window_after_a_minute_and_not_before() -> None:
    window = SlidingWindow()
    window.spend(slot_of(0.4), 7)

    window.advance(slot_of(60.4))
    assert window.total == 7
    window.advance(slot_of(60.5))
    assert window.total == 0


def test_it_is_told_when_so_much_will_have_left() -> None:
    window = SlidingWindow()
    window.spend(0, 4)
    window.spend(10, 4)

    assert window.slots_until(20, 4) == LAST_AGE + 1 - 20
    assert window.slots_until(20, 5) == LAST_AGE + 11 - 20
    assert window.slots_until(20, 0) == 0


def test_what_is_given_back_is_found_next_to_its_slot_but_not_far_from_it() -> None:
    window = SlidingWindow()
    window.spend(100, 5)
    window.spend(110, 5)

    assert window.give_back(101, 3) == 3
    assert window.give_back(101, 9) == 2
    assert list(window.entries()) == [(110, 5)]


def test_what_is_owed_takes_the_room_of_the_minutes_to_come() -> None:
    window = SlidingWindow()
    window.spend(0, 100)
    window.owe(1, 250, limit=100)

    assert window.total == 350
    window.advance(LAST_AGE + 1)
    assert window.total == 250
    window.advance(2 * (LAST_AGE + 1))
    assert window.total == 150


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 60), st.booleans()), min_size=1, max_size=60
    )
)
def test_no_minute_has_more_than_the_limit_whatever_is_spent_and_owed(
    moves: list[tuple[int, int, bool]],
) -> None:
    limit, slot, window = 50, 0, SlidingWindow()
    booked: dict[int, int] = {}
    for pause, amount, is_owed in moves:
        slot += pause
        window.advance(slot)
        if is_owed:
            window.owe(slot, amount, limit)
        elif window.total + amount <= limit:
            window.spend(slot, amount)
        booked.update(window.entries())
        assert window.total == sum(spent for _, spent in window.entries())
    for end in booked:
        assert sum(a for s, a in booked.items() if end - LAST_AGE <= s <= end) <= limit
