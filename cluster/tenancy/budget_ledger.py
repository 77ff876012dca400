"""The one place of a cluster where limits are counted: routers take leases out of it.

Owns what was spent and who holds places. Knows no limits: each message brings those of the
configuration that its router has, so that a change holds at once. Nothing is spent that is not
leased before, so the routers together never spend more than a limit; what they hold ahead of demand
is at most a hundredth of it, all of them together.
"""

from dataclasses import dataclass, field

from cluster.tenancy.leases import (
    RATES,
    Account,
    AccountState,
    AccountView,
    Claim,
    LeaseCall,
    LeaseReply,
    Verdict,
    is_scarce,
    most_ahead,
)
from cluster.tenancy.sliding_window import SLOT_SECONDS, SlidingWindow, slot_of

SILENCE = 5.0  # seconds until a router without a sign of life has ended, and its places are free


@dataclass(slots=True)
class _Router:
    number: int  # of its last message
    heard_at: float
    has_restored: bool = False  # it has told this ledger what it had spent before
    held: dict[Account, int] = field(default_factory=dict)  # places


class BudgetLedger:
    """Accounts of keys and tenants; `epoch` tells it from the ledgers before it."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self._windows: dict[Account, SlidingWindow] = {}
        self._routers: dict[str, _Router] = {}

    def lease(self, call: LeaseCall, now: float) -> LeaseReply:
        """Take in what a router says; grant what it claims, in order and as far as there is room.

        `now` is in seconds, of a clock that is not set.
        """
        self._forget_silent(now)
        if call.has_ended:
            self._routers.pop(call.router, None)
            return LeaseReply(self.epoch, len(self._routers))
        router = self._routers.setdefault(call.router, _Router(0, now))
        is_late = call.number <= router.number  # its sender has given it up
        if call.epoch != self.epoch or is_late:
            return LeaseReply(self.epoch, len(self._routers))
        router.number, router.heard_at = call.number, now
        slot = slot_of(now)
        for state in call.states:
            self._take_in(router, state, slot)
        router.has_restored = True
        verdicts = tuple(self._decide(router, call.states, claim, slot) for claim in call.claims)
        wanted = {
            index
            for claim, verdict in zip(call.claims, verdicts, strict=True)
            if verdict.refused is None
            for index, _ in claim.wants
        }
        views = tuple(
            self._view(router, state, slot, leases_ahead=index in wanted)
            for index, state in enumerate(call.states)
        )
        return LeaseReply(self.epoch, len(self._routers), verdicts, views)

    def used(self, account: Account, now: float) -> int:
        """Return how much of an account is spent, or held."""
        self._forget_silent(now)
        return self._used(account, slot_of(now))

    def _forget_silent(self, now: float) -> None:
        silent = [name for name, router in self._routers.items() if now - router.heard_at > SILENCE]
        for name in silent:
            del self._routers[name]

    def _take_in(self, router: _Router, state: AccountState, slot: int) -> None:
        account = state.account
        if account.meter not in RATES:
            router.held[account] = state.held
            if not state.held:
                del router.held[account]
            return
        window = self._windows.setdefault(account, SlidingWindow())
        window.advance(slot)
        if not router.has_restored:
            for age, amount in state.spent:
                window.spend(slot - age, amount)
        for age, amount in state.returned:
            window.give_back(slot - age, amount)
        if state.owed:
            window.owe(slot, state.owed, state.limit)

    def _used(self, account: Account, slot: int) -> int:
        if account.meter not in RATES:
            return sum(router.held.get(account, 0) for router in self._routers.values())
        window = self._windows.get(account)
        if window is None:
            return 0
        window.advance(slot)
        return window.total

    def _decide(
        self, router: _Router, states: tuple[AccountState, ...], claim: Claim, slot: int
    ) -> Verdict:
        for number, (index, amount) in enumerate(claim.wants):
            state = states[index]
            missing = self._used(state.account, slot) + amount - state.limit
            if missing > 0:
                return Verdict(number, self._retry_after(state, amount, missing, slot))
        for index, amount in claim.wants:
            self._grant(router, states[index].account, amount, slot)
        return Verdict()

    def _retry_after(
        self, state: AccountState, amount: int, missing: int, slot: int
    ) -> float | None:
        if state.account.meter not in RATES or amount > state.limit:
            return None
        return self._windows[state.account].slots_until(slot, missing) * SLOT_SECONDS

    def _grant(self, router: _Router, account: Account, amount: int, slot: int) -> None:
        if account.meter in RATES:
            self._windows[account].spend(slot, amount)
        else:
            router.held[account] = router.held.get(account, 0) + amount

    def _view(
        self, router: _Router, state: AccountState, slot: int, *, leases_ahead: bool
    ) -> AccountView:
        account, ahead = state.account, 0
        if leases_ahead:
            piece = max(0, most_ahead(state.limit, len(self._routers)) - state.ahead)
            left = state.limit - self._used(account, slot) - piece
            if left >= 0 and (account.meter in RATES or not is_scarce(left, state.limit)):
                ahead = piece
                self._grant(router, account, piece, slot)
        used = self._used(account, slot)
        reset = 0.0
        if account.meter in RATES:
            reset = self._windows[account].slots_until(slot, used) * SLOT_SECONDS
        return AccountView(max(0, state.limit - used), reset, ahead)
