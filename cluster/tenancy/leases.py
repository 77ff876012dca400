"""What routers and the budget ledger say to each other.

An account is one meter of one subject, which is a key or a tenant. All a router has to say goes
into one message, and it sends the next one when that is answered. So what it says it holds is never
older than what the ledger knows.
"""

from typing import Literal

import msgspec

# Requests and tokens are spent by the minute; places are held: of answers, and of those that wait.
Meter = Literal["requests", "tokens", "concurrency", "waiting"]
RATES: tuple[Meter, ...] = ("requests", "tokens")
Spent = tuple[tuple[int, int], ...]  # (age in slots, amount)

AHEAD = 100  # routers together hold this part of a limit ahead of demand, at most


def most_ahead(limit: int, num_routers: int) -> int:
    """Return how much of a limit one of some routers may hold ahead of demand."""
    return limit // AHEAD // num_routers


def is_scarce(remaining: int, limit: int) -> bool:
    """Tell whether few of the places of a limit are free: then none is held ahead of demand."""
    return 2 * remaining < limit


class Account(msgspec.Struct, frozen=True):
    """What is counted."""

    subject: str  # "key:..." or "tenant:..."
    meter: Meter


class AccountState(msgspec.Struct, frozen=True):
    """How an account stands with one router; `limit` is what its configuration says now."""

    account: Account
    limit: int
    held: int = 0  # places, those in use and those ahead of demand
    ahead: int = 0  # leased, and not asked for so far
    returned: Spent = ()  # leased then and not used
    owed: int = 0  # used without a lease
    spent: Spent = ()  # all of the last minute; only for a ledger that has just begun


class Claim(msgspec.Struct, frozen=True):
    """What one call needs of several accounts, all or nothing: (index of the state, amount)."""

    wants: tuple[tuple[int, int], ...]


class LeaseCall(msgspec.Struct, frozen=True):
    """A message of a router, its `number`th."""

    router: str
    number: int
    epoch: str  # of the ledger that it knows
    states: tuple[AccountState, ...]
    claims: tuple[Claim, ...]
    has_ended: bool = False  # nothing will follow, and nothing is held


class Verdict(msgspec.Struct, frozen=True):
    """The answer to a claim."""

    refused: int | None = None  # which of its wants has no room; None: granted
    retry_after: float | None = None  # seconds until there is room; None: nobody knows


class AccountView(msgspec.Struct, frozen=True):
    """What the ledger says of an account."""

    remaining: int
    reset: float  # seconds until nothing of it is used, if nothing is added
    ahead: int = 0  # granted beyond the claims


class LeaseReply(msgspec.Struct, frozen=True):
    """The answer; one of an epoch that the router does not know has granted nothing."""

    epoch: str
    num_routers: int
    verdicts: tuple[Verdict, ...] = ()
    views: tuple[AccountView, ...] = ()
