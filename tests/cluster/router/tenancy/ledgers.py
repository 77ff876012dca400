"""Routers' clients over one real ledger, in a time of their own."""

import asyncio

from cluster.errors import Unavailable
from cluster.router.tenancy.budget_client import BudgetClient, Grant, Outcome, Want
from cluster.tenancy.budget_ledger import BudgetLedger
from cluster.tenancy.leases import Account, LeaseCall, LeaseReply, Meter


class Cluster:
    """A ledger that a test may take away, its clients and the time."""

    def __init__(self, num_routers: int = 1) -> None:
        self.now = 1000.0
        self.ledger: BudgetLedger | None = BudgetLedger("first")
        self.num_messages = 0
        self.is_hanging = False
        self.clients = [
            BudgetClient(f"router {number}", self._lease, lambda: self.now)
            for number in range(num_routers)
        ]

    async def _lease(self, call: LeaseCall) -> LeaseReply:
        self.num_messages += 1
        await asyncio.sleep(0)
        if self.is_hanging:
            await asyncio.Event().wait()
        if self.ledger is None:
            raise Unavailable("the adapter pool is down")
        return self.ledger.lease(call, self.now)

    async def pass_time(self, seconds: float) -> None:
        """Let time go by, in which routers sync once a second."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for client in self.clients:
                await client.sync()


def want(amount: int, limit: int, meter: Meter = "requests", subject: str = "key:k") -> Want:
    return Want(Account(subject, meter), limit, amount)


def is_granted(outcome: Outcome) -> bool:
    return isinstance(outcome, Grant)
