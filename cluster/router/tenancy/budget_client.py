"""A router's side of the budget ledger: leases, asked for together and ahead of demand.

A call that finds what it needs leased waits for nothing. Others share the next message; there is
one on its way at a time. Places that come free are told of at once only where few are left, else
they are kept for the next call, as far as a router may hold some ahead of demand, or told of with
what is said next, in a second at the latest. A ledger that does not answer is done without:
`LocalAccount` has the rule, which holds for a minute. After that calls of limited keys are refused
until it is back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cluster.errors import Unavailable
from cluster.router.tenancy.local_account import LocalAccount
from cluster.tenancy.leases import (
    Account,
    AccountState,
    Claim,
    LeaseCall,
    LeaseReply,
    Verdict,
)
from cluster.tenancy.sliding_window import SLOT_SECONDS, slot_of

logger = logging.getLogger("topwork.router")

TIMEOUT = 0.5  # seconds that a call waits for the ledger
INTERVAL = 1.0  # seconds between signs of life
MAX_AWAY = 60.0  # seconds that limits hold without a ledger
RETRY_AFTER = 5


@dataclass(frozen=True, slots=True)
class Want:
    """What a call needs of an account."""

    account: Account
    limit: int
    amount: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What was wanted is leased, as of this slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """There is no room for one of the wants."""

    want: Want
    retry_after: float | None  # seconds; None: nobody knows


Outcome = Grant | Refusal
_Waiting = tuple[tuple[Want, ...], "asyncio.Future[Outcome]"]


class BudgetClient:
    """The leases of one router; belongs to one event loop. `clock` gives seconds."""

    def __init__(
        self,
        router: str,
        lease: Callable[[LeaseCall], Awaitable[LeaseReply]],
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._lease = lease
        self._clock = clock
        self._accounts: dict[Account, LocalAccount] = {}
        self._waiting: list[_Waiting] = []
        self._exchanging: asyncio.Task[None] | None = None
        self._number = 0  # of the last message
        self._epoch = ""
        self._num_routers = 1
        self._lost_at: float | None = None
        self._has_news = False
        self._wants_all = False  # to hear of all accounts that are in use

    async def acquire(self, wants: Sequence[Want]) -> Outcome:
        """Lease all that is wanted, each account once, or nothing.

        Raises:
            Unavailable: if the ledger has been away for too long.
        """
        slot = slot_of(self._clock())
        locals_ = [self._local(want) for want in wants]
        if all(one.ahead >= want.amount for one, want in zip(locals_, wants, strict=True)):
            for one, want in zip(locals_, wants, strict=True):
                one.take(want.amount, slot)
            return Grant(slot)
        if self._lost_at is not None:
            return self._decide_alone(wants)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((tuple(wants), future))
        self._begin_exchange()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(wants, future.result())
            raise

    def give_back(self, account: Account, amount: int, slot: int) -> None:
        """Give back what a grant of that slot has leased and nobody has used."""
        if amount:
            one = self._accounts[account]
            one.give_back(amount, slot, self._num_routers)
            if not one.is_rate:
                one.left_after(slot_of(self._clock()) - slot)
            # Else the ledger hears of it with the next message: one for each place that comes free
            # would be most of what limits cost.
            if not one.is_rate and one.is_scarce and self._lost_at is None:
                self._begin_exchange()

    def owe(self, want: Want, amount: int) -> None:
        """Note what was used beyond what was leased for a want."""
        if amount:
            self._local(want).owe(amount, slot_of(self._clock()))

    def remaining(self, want: Want) -> tuple[int, float]:
        """Return (what is left of a limit, seconds until nothing of it is used)."""
        return self._local(want).remaining_at(slot_of(self._clock()))

    def seconds_per_place(self, account: Account) -> float:
        """Return how often one of all places comes free, by how long they were held lately."""
        one = self._accounts[account]
        return one.mean_slots * SLOT_SECONDS / one.limit

    async def run(self) -> None:
        """Give signs of life, and what is not needed back, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.sync()

    async def sync(self) -> None:
        """Exchange news with the ledger, if there is anything that it counts."""
        if not self._accounts:
            return
        slot = slot_of(self._clock())
        for one in self._accounts.values():
            if one.ahead_slot < slot - 1:
                one.put_back_ahead()
        self._wants_all = True
        self._begin_exchange()
        if self._exchanging is not None:
            await asyncio.wait({self._exchanging})

    async def close(self) -> None:
        """Give all leases back."""
        if self._exchanging is not None:
            self._exchanging.cancel()
            await asyncio.wait({self._exchanging})
        if not self._epoch:
            return
        for one in self._accounts.values():
            one.put_back_ahead()
        slot = slot_of(self._clock())
        states = tuple(one.state(slot, has_new_ledger=False) for one in self._accounts.values())
        try:
            await self._send(states, ())
            await self._send((), (), has_ended=True)
        except (Unavailable, TimeoutError):
            return  # it will notice

    def _local(self, want: Want) -> LocalAccount:
        one = self._accounts.get(want.account)
        if one is None:
            one = self._accounts[want.account] = LocalAccount(want.account, want.limit)
        if one.limit != want.limit:  # what there was room for ahead of demand there may not be now
            one.limit = want.limit
            one.put_back_ahead()
        return one

    def _begin_exchange(self) -> None:
        self._has_news = True
        if self._exchanging is None or self._exchanging.done():
            self._exchanging = asyncio.create_task(self._exchange())

    async def _exchange(self) -> None:
        """Send what there is to say, until there is no more."""
        while self._has_news or self._waiting:
            self._has_news = False
            waiting, self._waiting = self._waiting, []
            try:
                await self._exchange_once(waiting)
            except (Unavailable, TimeoutError) as error:
                self._lose(error)
                self._has_news = False  # who came meanwhile does not try it again
                waiting += self._waiting
                self._waiting = []
                for wants, future in waiting:
                    self._answer_alone(wants, future)
            finally:
                for _, future in waiting:  # where it ends otherwise, nobody may be left waiting
                    if not future.done():
                        future.set_exception(_away())

    async def _exchange_once(self, waiting: list[_Waiting]) -> None:
        claimed = {want.account for wants, _ in waiting for want in wants}
        wants_all, self._wants_all = self._wants_all or self._lost_at is not None, False
        chosen = [
            one
            for one in self._accounts.values()
            if one.account in claimed or not one.is_quiet or (wants_all and one.is_in_use)
        ]
        reply = await self._tell(chosen, waiting, has_new_ledger=False)
        if reply.epoch != self._epoch:  # it has begun anew, and has taken nothing in
            self._epoch = reply.epoch
            chosen = list(self._accounts.values())
            reply = await self._tell(chosen, waiting, has_new_ledger=True)
            if reply.epoch != self._epoch:
                raise _away()
        self._take_in(reply, chosen, waiting)

    async def _tell(
        self, chosen: list[LocalAccount], waiting: list[_Waiting], *, has_new_ledger: bool
    ) -> LeaseReply:
        if not self._epoch:
            return await self._send((), ())
        index_of = {one.account: index for index, one in enumerate(chosen)}
        claims = tuple(
            Claim(tuple((index_of[want.account], want.amount) for want in wants))
            for wants, _ in waiting
        )
        slot = slot_of(self._clock())
        states = tuple(one.state(slot, has_new_ledger=has_new_ledger) for one in chosen)
        try:
            return await self._send(states, claims)
        except (Unavailable, TimeoutError):
            for one, state in zip(chosen, states, strict=True):
                one.owed += state.owed  # rather twice than never
            raise

    async def _send(
        self,
        states: tuple[AccountState, ...],
        claims: tuple[Claim, ...],
        *,
        has_ended: bool = False,
    ) -> LeaseReply:
        self._number += 1
        call = LeaseCall(self._router, self._number, self._epoch, states, claims, has_ended)
        async with asyncio.timeout(TIMEOUT):
            return await self._lease(call)

    def _take_in(
        self, reply: LeaseReply, chosen: list[LocalAccount], waiting: list[_Waiting]
    ) -> None:
        if self._lost_at is not None:
            logger.info("the budget ledger is back")
        self._lost_at = None
        self._num_routers = max(1, reply.num_routers)
        slot = slot_of(self._clock())
        for one, view in zip(chosen, reply.views, strict=True):
            one.see(view, slot, self._num_routers)
        for (wants, future), verdict in zip(waiting, reply.verdicts, strict=True):
            outcome = self._outcome(wants, verdict, slot)
            if future.done():
                self._undo(wants, outcome)
            else:
                future.set_result(outcome)

    def _outcome(self, wants: tuple[Want, ...], verdict: Verdict, slot: int) -> Outcome:
        if verdict.refused is not None:
            return Refusal(wants[verdict.refused], verdict.retry_after)
        for want in wants:
            self._accounts[want.account].use(want.amount, slot)
        return Grant(slot)

    def _undo(self, wants: Sequence[Want], outcome: Outcome) -> None:
        """Give back what was granted to a call that waits no more."""
        if isinstance(outcome, Grant):
            for want in wants:
                self.give_back(want.account, want.amount, outcome.slot)

    # What happens while there is no ledger.

    def _lose(self, error: BaseException) -> None:
        if self._lost_at is None:
            logger.warning("the budget ledger is away: %s", error or "no answer")
            self._lost_at = self._clock()
        slot = slot_of(self._clock())
        for one in self._accounts.values():
            one.lose_ledger(slot, self._num_routers)

    def _answer_alone(self, wants: tuple[Want, ...], future: "asyncio.Future[Outcome]") -> None:
        if future.done():
            return
        try:
            future.set_result(self._decide_alone(wants))
        except Unavailable as error:
            future.set_exception(error)

    def _decide_alone(self, wants: Sequence[Want]) -> Outcome:
        assert self._lost_at is not None, "there is a ledger"
        now = self._clock()
        if now - self._lost_at > MAX_AWAY:
            raise _away()
        slot = slot_of(now)
        for want in wants:
            one = self._local(want)
            one.lose_ledger(slot, self._num_routers)
            if not one.may_use_alone(want.amount, slot):
                return Refusal(want, one.seconds_until(want.amount, slot))
        for want in wants:
            self._accounts[want.account].use_alone(want.amount, slot)
        return Grant(slot)


def _away() -> Unavailable:
    return Unavailable(
        "the limits of this key cannot be checked: the adapter pool is away",
        retry_after=RETRY_AFTER,
    )
