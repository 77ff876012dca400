"""Room that tenants share: a lone one has nearly all, and whoever comes next finds a place."""

from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.tenancy.shared_room import FACTOR, NOBODY, SharedRoom, most_of
from tests.random_cases import num_cases


def fill(room: SharedRoom, tenant: str, weight: int = 1) -> None:
    while room.may_take(tenant, 1, weight):
        room.take(tenant, 1, weight)


def test_a_tenant_that_is_alone_has_eight_ninths() -> None:
    room = SharedRoom(1024)
    fill(room, "greedy")

    assert room.held_by("greedy") == most_of("greedy", 1024) == 910
    assert room.may_take("other", 91)
    assert not room.may_take("other", 92)


def test_a_heavy_weight_leaves_a_ninth_too() -> None:
    room = SharedRoom(1024)
    fill(room, "heavy", 1000)
    assert room.held_by("heavy") == 910


def test_where_keys_are_off_all_of_the_room_can_be_taken() -> None:
    room = SharedRoom(8)
    fill(room, NOBODY)
    assert room.num_held == most_of(NOBODY, 8) == 8


def test_a_room_of_one_place_is_anybodys() -> None:
    room = SharedRoom(1)
    assert most_of("first", 1) == 1
    fill(room, "first")
    assert room.num_held == 1 and not room.may_take("second", 1)


def test_seven_that_take_all_they_can_at_once_fill_a_thousand_places() -> None:
    room = SharedRoom(1024)
    for number in range(6):
        fill(room, f"tenant {number}")
    assert room.may_take("the seventh", 1)


def test_a_tenant_that_holds_too_much_gets_no_place_back_before_a_newcomer_has_one() -> None:
    room = SharedRoom(90)
    for tenant in "abcdefgh":
        fill(room, tenant)
    assert not room.has_room(1)
    holders = [tenant for tenant in "abcdefgh" if room.held_by(tenant)]
    assert len(holders) >= 4
    room.give_back("a", 1)
    assert not any(room.may_take(tenant, 1) for tenant in holders)
    assert room.may_take("newcomer", 1)


@pytest.mark.parametrize(("weights"), [(1, 1), (1, 3), (5, 2, 1)])
def test_tenants_that_always_want_more_end_up_with_their_weights_part(
    weights: tuple[int, ...],
) -> None:
    room, turns = SharedRoom(1800), 20_000
    holders = [f"tenant {number}" for number in range(len(weights))]
    for tenant, weight in zip(holders, weights, strict=True):  # the first has nearly all
        fill(room, tenant, weight)
    for turn in range(turns):  # answers end in turn; everybody is back at once, the first first
        tenant = holders[turn % len(holders)]
        if room.held_by(tenant) > 1:
            room.give_back(tenant, 1)
        for one, weight in zip(holders, weights, strict=True):
            fill(room, one, weight)
    for tenant, weight in zip(holders, weights, strict=True):
        part = Fraction(weight, sum(weights)) * Fraction(FACTOR, FACTOR + 1) * room.size
        assert abs(room.held_by(tenant) - part) <= 3
    assert abs(room.size - room.num_held - room.size / (FACTOR + 1)) <= 3


class Tenants(RuleBasedStateMachine):
    """Tenants that come and go with changing weights, in a small room."""

    @initialize(size=st.integers(1, 40))
    def build(self, size: int) -> None:
        self.room = SharedRoom(size)
        self.held: dict[str, list[int]] = {}  # weights with which places were taken, by tenant

    @rule(tenant=st.sampled_from("abcdef"), count=st.integers(1, 9), weight=st.integers(1, 9))
    def ask(self, tenant: str, count: int, weight: int) -> None:
        held = len(self.held.get(tenant, []))
        free = self.room.size - self.room.num_held
        others = sum(taken[-1] for one, taken in self.held.items() if one != tenant)
        part = Fraction(weight, others + weight) * FACTOR * (free - count)
        is_first = held == 0 and count == 1 and free > 0
        assert self.room.may_take(tenant, count, weight) == (
            is_first or (count <= free and held + count <= part)
        )
        if self.room.may_take(tenant, count, weight):
            self.room.take(tenant, count, weight)
            self.held.setdefault(tenant, []).extend([weight] * count)
            self.held[tenant] = [weight] * len(self.held[tenant])

    @rule(tenant=st.sampled_from("abcdef"), weight=st.integers(1, 9))
    def go_on(self, tenant: str, weight: int) -> None:
        """What goes on after a loss takes a place whether there is one or not."""
        if self.room.num_held < self.room.size + 3:
            self.room.take(tenant, 1, weight)
            self.held[tenant] = [weight] * (len(self.held.get(tenant, [])) + 1)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(sorted(self.held)))
        count = data.draw(st.integers(1, len(self.held[tenant])))
        self.room.give_back(tenant, count)
        del self.held[tenant][:count]
        if not self.held[tenant]:
            del self.held[tenant]

    @invariant()
    def places_are_counted(self) -> None:
        for tenant in "abcdef":
            assert self.room.held_by(tenant) == len(self.held.get(tenant, []))
        assert self.room.num_held == sum(map(len, self.held.values()))

    @invariant()
    def a_newcomer_gets_in_wherever_a_place_is_free(self) -> None:
        assert self.room.may_take("newcomer", 1) == (self.room.num_held < self.room.size)

    @invariant()
    def the_last_place_is_for_one_that_holds_none(self) -> None:
        if self.room.num_held == self.room.size - 1:
            assert not any(self.room.may_take(tenant, 1, 9) for tenant in self.held)


Tenants.TestCase.settings = settings(
    max_examples=num_cases(60), stateful_step_count=40, deadline=None
)
TestTenants = Tenants.TestCase
