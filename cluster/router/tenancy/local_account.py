"""What one router knows of one account: its leases, what it used, and what the ledger last said.

Owns the rule for the time without a ledger: a router goes on with what it had spent in the minute
before and its part of what was left. All routers together stay within the limit so, as far as they
had the same news. Knows no clock and no connection.
"""

from dataclasses import dataclass, field

from cluster.tenancy.leases import (
    RATES,
    Account,
    AccountState,
    AccountView,
    Spent,
    is_scarce,
    most_ahead,
)
from cluster.tenancy.sliding_window import SLOT_SECONDS, SlidingWindow

_WEIGHT = 0.1  # of the latest in a mean


@dataclass(slots=True)
class LocalAccount:
    """One account; slots are the router's own."""

    account: Account
    limit: int
    ahead: int = 0  # leased and not used
    ahead_slot: int = 0  # when that was; of places, when one was taken out of it last
    in_use: int = 0  # places
    told_held: int = 0  # places in use or ahead, as the ledger knows
    owed: int = 0
    returned: dict[int, int] = field(default_factory=dict)  # by slot of its lease
    history: SlidingWindow = field(default_factory=SlidingWindow)  # of what was used here
    remaining: int | None = None  # by the ledger
    cap: int | None = None  # of what may be used here, while there is no ledger
    reset: float = 0.0
    seen_slot: int = 0
    mean_slots: float = 0.0  # that a place was held, lately

    @property
    def is_rate(self) -> bool:
        """Whether it is spent by the minute."""
        return self.account.meter in RATES

    @property
    def is_quiet(self) -> bool:
        """Whether the ledger has nothing to learn of it."""
        is_known = self.is_rate or self.in_use + self.ahead == self.told_held
        return is_known and not (self.returned or self.owed)

    @property
    def is_scarce(self) -> bool:
        """Whether others may wait for a place that comes free, as far as is known here."""
        return self.remaining is None or is_scarce(self.remaining, self.limit)

    @property
    def is_in_use(self) -> bool:
        """Whether there has been use of it here lately, or there is a view to be made good."""
        return self.history.total > 0 or self.in_use > 0 or self.cap is not None

    def take(self, amount: int, slot: int) -> None:
        """Use what is leased ahead."""
        self.ahead -= amount
        if self.is_rate:
            self.use(amount, slot)
        else:
            self.in_use += amount
            self.ahead_slot = slot

    def use(self, amount: int, slot: int) -> None:
        """Use an amount that is leased."""
        if self.is_rate:
            self.history.advance(slot)
            self.history.spend(slot, amount)
        else:
            self.in_use += amount
            self.told_held += amount

    def give_back(self, amount: int, slot: int, num_routers: int) -> None:
        """Give back what was used, at that slot, for nothing.

        Of places that are not scarce one of several routers keeps its part ahead of demand.
        """
        if not self.is_rate:
            self.in_use -= amount
            if self.cap is None and not self.is_scarce:
                room = most_ahead(self.limit, num_routers) - self.ahead
                self.ahead += max(0, min(amount, room))
            return
        found = self.history.give_back(slot, amount)
        forgiven = min(found, self.owed) if self.cap is not None else 0
        self.owed -= forgiven
        if found > forgiven:
            self.returned[slot] = self.returned.get(slot, 0) + found - forgiven

    def left_after(self, num_slots: int) -> None:
        """Note for how long a place was held."""
        weight = _WEIGHT if self.mean_slots else 1.0
        self.mean_slots += weight * (num_slots - self.mean_slots)

    def owe(self, amount: int, slot: int) -> None:
        """Note what was used beyond what was leased."""
        self.history.owe(slot, amount, self.limit)
        self.owed += amount

    def put_back_ahead(self) -> None:
        """Give back what nobody has asked for."""
        if self.ahead and self.is_rate:
            self.returned[self.ahead_slot] = self.returned.get(self.ahead_slot, 0) + self.ahead
        self.ahead = 0

    def state(self, slot: int, *, has_new_ledger: bool) -> AccountState:
        """Return what the ledger is to know; it is known then."""
        self.history.advance(slot)
        if not self.is_rate:
            self.ahead = 0 if has_new_ledger else self.ahead
            self.told_held = self.in_use + self.ahead
            return AccountState(self.account, self.limit, held=self.told_held, ahead=self.ahead)
        returned = tuple((slot - one, amount) for one, amount in sorted(self.returned.items()))
        owed = self.owed
        spent: Spent = ()
        if has_new_ledger:  # which learns all at once, without what is not used
            self.ahead, owed, returned = 0, 0, ()
            spent = self._spent(slot)
        self.owed = 0
        self.returned.clear()
        return AccountState(
            self.account, self.limit, ahead=self.ahead, returned=returned, owed=owed, spent=spent
        )

    def see(self, view: AccountView, slot: int, num_routers: int) -> None:
        """Take in what the ledger says, of so many routers."""
        if view.ahead:
            self.ahead += view.ahead
            self.ahead_slot = slot
            self.told_held += 0 if self.is_rate else view.ahead
        if not self.is_rate:  # the part is a smaller one since there are more routers
            self.ahead = min(self.ahead, most_ahead(self.limit, num_routers))
        self.remaining, self.reset, self.seen_slot = view.remaining, view.reset, slot
        self.cap = None

    def lose_ledger(self, slot: int, num_routers: int) -> None:
        """Go on alone."""
        if self.cap is not None:
            return
        self.history.advance(slot)
        used = self.history.total if self.is_rate else self.in_use
        is_news = self.remaining is not None and slot - self.seen_slot <= 60 / SLOT_SECONDS
        left = self.remaining if is_news and self.remaining is not None else self.limit
        self.cap = used + self.ahead + left // num_routers
        self.put_back_ahead()

    def may_use_alone(self, amount: int, slot: int) -> bool:
        """Tell whether there is room without a ledger."""
        assert self.cap is not None, "there is a ledger"
        self.history.advance(slot)
        used = self.history.total if self.is_rate else self.in_use
        return used + amount <= min(self.cap, self.limit)

    def seconds_until(self, amount: int, slot: int) -> float | None:
        """Return when there is room without a ledger; None: nobody knows."""
        assert self.cap is not None, "there is a ledger"
        most = min(self.cap, self.limit)
        if not self.is_rate or amount > most:
            return None
        missing = self.history.total + amount - most
        return self.history.slots_until(slot, missing) * SLOT_SECONDS

    def use_alone(self, amount: int, slot: int) -> None:
        """Use an amount without a lease."""
        self.use(amount, slot)
        if self.is_rate:
            self.owed += amount
        else:
            self.told_held -= amount

    def remaining_at(self, slot: int) -> tuple[int, float]:
        """Return (what is left, seconds until nothing is used), as far as is known here."""
        if self.cap is not None:
            used = self.history.total if self.is_rate else self.in_use
            seconds = self.history.slots_until(slot, used) * SLOT_SECONDS if self.is_rate else 0.0
            return max(0, min(self.cap, self.limit) - used), seconds
        left = self.limit if self.remaining is None else self.remaining
        if not self.is_rate:  # with what the ledger has not been told of yet
            return min(self.limit, left + self.told_held - self.in_use), 0.0
        age = (slot - self.seen_slot) * SLOT_SECONDS
        return left + self.ahead, max(0.0, self.reset - age)

    def _spent(self, slot: int) -> Spent:
        return tuple((slot - one, amount) for one, amount in self.history.entries())
