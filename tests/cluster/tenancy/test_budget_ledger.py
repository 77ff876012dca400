"""The ledger grants all or nothing, and forgets routers that are gone, not what they spent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.tenancy.budget_ledger import SILENCE, BudgetLedger
from cluster.tenancy.leases import Account, AccountState, Claim, LeaseCall, LeaseReply

REQUESTS = Account("tenant:acme", "requests")
PLACES = Account("tenant:acme", "concurrency")


class Router:
    """What a router sends, as plainly as can be."""

    def __init__(self, ledger: BudgetLedger, name: str) -> None:
        self._ledger, self._name, self._number = ledger, name, 0

    def say(self, now: float, state: AccountState, *amounts: int, epoch: str = "e") -> LeaseReply:
        self._number += 1
        claims = tuple(Claim(((0, amount),)) for amount in amounts)
        call = LeaseCall(self._name, self._number, epoch, (state,), claims)
        return self._ledger.lease(call, now)


@pytest.fixture
def ledger() -> BudgetLedger:
    return BudgetLedger("e")


def test_a_claim_of_two_accounts_takes_nothing_if_one_has_no_room(ledger: BudgetLedger) -> None:
    states = (AccountState(REQUESTS, 10), AccountState(PLACES, 1))
    call = LeaseCall("r", 1, "e", states, (Claim(((0, 1), (1, 2))), Claim(((0, 1), (1, 1)))))
    reply = ledger.lease(call, 0.0)

    assert [verdict.refused for verdict in reply.verdicts] == [1, None]
    assert ledger.used(REQUESTS, 0.0) == 1


def test_a_refusal_tells_when_there_is_room_again(ledger: BudgetLedger) -> None:
    router = Router(ledger, "r")
    router.say(10.0, AccountState(REQUESTS, 5), 5)
    verdict = router.say(30.0, AccountState(REQUESTS, 5), 1).verdicts[0]
    assert verdict.retry_after == 40.5
    assert router.say(70.5, AccountState(REQUESTS, 5), 1).verdicts[0].refused is None


def test_more_than_a_limit_is_never_served_and_no_time_is_told(ledger: BudgetLedger) -> None:
    verdict = Router(ledger, "r").say(0.0, AccountState(REQUESTS, 5), 6).verdicts[0]
    assert (verdict.refused, verdict.retry_after) == (0, None)


def test_a_limit_that_changes_holds_with_the_next_message(ledger: BudgetLedger) -> None:
    router = Router(ledger, "r")
    router.say(0.0, AccountState(REQUESTS, 5), 5)
    assert router.say(1.0, AccountState(REQUESTS, 9), 4).verdicts[0].refused is None
    assert router.say(2.0, AccountState(REQUESTS, 5), 1).verdicts[0].refused == 0


def test_routers_lease_a_hundredth_ahead_together(ledger: BudgetLedger) -> None:
    one, other = Router(ledger, "one"), Router(ledger, "other")
    state = AccountState(REQUESTS, 1000)
    assert one.say(0.0, state, 1).views[0].ahead == 10
    assert other.say(0.0, state, 1).views[0].ahead == 5
    assert one.say(0.0, AccountState(REQUESTS, 1000, ahead=4), 1).views[0].ahead == 1
    assert ledger.used(REQUESTS, 0.0) == 19


def test_places_are_leased_ahead_only_while_most_are_free(ledger: BudgetLedger) -> None:
    router = Router(ledger, "r")
    assert router.say(0.0, AccountState(PLACES, 1000), 490).views[0].ahead == 10
    state = AccountState(PLACES, 1000, held=500, ahead=10)
    assert router.say(0.0, state, 1).views[0].ahead == 0
    assert ledger.used(PLACES, 0.0) == 501


def test_places_of_a_router_that_is_silent_come_back_and_what_it_spent_does_not(
    ledger: BudgetLedger,
) -> None:
    dead, alive = Router(ledger, "dead"), Router(ledger, "alive")
    dead.say(0.0, AccountState(PLACES, 2), 2)
    dead.say(0.0, AccountState(REQUESTS, 2), 2)

    assert alive.say(SILENCE, AccountState(PLACES, 2), 1).verdicts[0].refused == 0
    assert alive.say(SILENCE + 0.1, AccountState(PLACES, 2), 1).verdicts[0].refused is None
    assert alive.say(SILENCE + 0.1, AccountState(REQUESTS, 2), 1).verdicts[0].refused == 0


def test_a_message_that_comes_late_changes_nothing(ledger: BudgetLedger) -> None:
    old = LeaseCall("r", 1, "e", (AccountState(PLACES, 9, held=9),), ())
    new = LeaseCall("r", 2, "e", (AccountState(PLACES, 9, held=1),), ())
    ledger.lease(new, 0.0)
    assert ledger.lease(old, 0.1).views == ()
    assert ledger.used(PLACES, 0.1) == 1


def test_a_ledger_that_has_begun_anew_takes_in_what_was_spent_once(ledger: BudgetLedger) -> None:
    router = Router(ledger, "r")
    state = AccountState(REQUESTS, 10, spent=((100, 4), (2, 3)))
    assert router.say(100.0, state, 1, epoch="before").verdicts == ()
    assert router.say(100.0, state, 4).verdicts[0].refused == 0
    assert router.say(100.0, state, 3).verdicts[0].refused is None
    assert ledger.used(REQUESTS, 110.5) == 6  # four were spent 50 seconds before the first word


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 4), st.booleans()),
        max_size=80,
    )
)
def test_places_are_never_more_than_the_limit_among_routers_that_live(
    moves: list[tuple[int, int, int, bool]],
) -> None:
    ledger, now = BudgetLedger("e"), 0.0
    routers = [Router(ledger, str(number)) for number in range(3)]
    held, heard = [0] * 3, [0.0] * 3
    for number, leaves, amount, is_later in moves:
        now += 3.0 if is_later else 0.0
        if now - heard[number] > SILENCE:
            held[number] = 0  # it is a new one
        held[number] -= min(leaves, held[number])
        reply = routers[number].say(now, AccountState(PLACES, 5, held=held[number]), amount)
        heard[number] = now
        if reply.verdicts[0].refused is None:
            held[number] += amount
        living = [h for h, at in zip(held, heard, strict=True) if now - at <= SILENCE]
        assert ledger.used(PLACES, now) == sum(living) <= 5
