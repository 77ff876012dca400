"""Nobody holds more places than it leaves free, so that there is room for who comes next."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.tenancy.shared_room import NOBODY, SharedRoom


def fill(room: SharedRoom, tenant: str) -> None:
    while room.may_take(tenant, 1):
        room.take(tenant, 1)


def test_one_tenant_that_takes_all_it_can_leaves_half() -> None:
    room = SharedRoom(1024)
    fill(room, "greedy")

    assert room.held_by("greedy") == 512
    assert room.may_take("other", 256)
    assert not room.may_take("other", 257)


def test_where_keys_are_off_all_of_the_room_can_be_taken() -> None:
    room = SharedRoom(8)
    fill(room, NOBODY)
    assert room.num_held == 8


def test_nine_of_a_thousand_places_leave_one_for_the_tenth() -> None:
    room = SharedRoom(1024)
    for number in range(9):
        fill(room, f"tenant {number}")
    assert room.may_take("the tenth", 1)


TENANTS = st.sampled_from(["a", "b", "c", "d", "e"])


@given(st.lists(st.tuples(TENANTS, st.integers(1, 40), st.booleans()), max_size=200))
def test_whatever_five_tenants_do_a_sixth_gets_in(moves: list[tuple[str, int, bool]]) -> None:
    room = SharedRoom(64)
    for tenant, count, leaves in moves:
        if leaves:
            room.give_back(tenant, min(count, room.held_by(tenant)))
        elif room.may_take(tenant, count):
            room.take(tenant, count)
            assert room.held_by(tenant) <= room.size - room.num_held
        assert room.num_held == sum(map(room.held_by, "abcde")) <= room.size
    assert room.may_take("newcomer", 1)
