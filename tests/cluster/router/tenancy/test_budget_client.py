"""Leases: limits hold over all routers, and a ledger that is away makes nobody wait."""

import asyncio

import pytest

from cluster.errors import Unavailable
from cluster.router.tenancy import budget_client
from cluster.router.tenancy.budget_client import MAX_AWAY, Grant, Refusal
from cluster.tenancy.budget_ledger import SILENCE, BudgetLedger
from cluster.tenancy.leases import Account
from tests.cluster.router.tenancy.ledgers import Cluster, is_granted, want


@pytest.mark.parametrize("limit", [60, 6000])
async def test_three_routers_together_keep_within_three_percent_of_a_limit(limit: int) -> None:
    cluster = Cluster(3)
    granted: list[float] = []
    for tick in range(600):  # five minutes, in halves of a second
        cluster.now += 0.5
        for number, client in enumerate(cluster.clients):
            # All want too much, one of them ten times what the others do.
            for _ in range(limit // (20 if number else 2)):
                if not is_granted(await client.acquire([want(1, limit)])):
                    break
                granted.append(cluster.now)
        if tick % 2:
            for client in cluster.clients:
                await client.sync()

    for start in range(1000, 1241, 10):
        in_a_minute = sum(start <= at < start + 60 for at in granted)
        assert in_a_minute <= limit
    assert 0.97 * 5 * limit <= len(granted) <= 5 * limit


async def test_what_is_leased_ahead_needs_no_message() -> None:
    cluster = Cluster()
    (client,) = cluster.clients
    await client.acquire([want(1, 1000)])
    before = cluster.num_messages
    for _ in range(10):
        assert is_granted(await client.acquire([want(1, 1000)]))
    assert cluster.num_messages == before


async def test_calls_that_come_together_share_a_message() -> None:
    cluster = Cluster()
    (client,) = cluster.clients
    await client.acquire([want(1, 60)])
    before = cluster.num_messages
    outcomes = await asyncio.gather(*(client.acquire([want(1, 60)]) for _ in range(100)))
    assert sum(map(is_granted, outcomes)) == 59
    assert cluster.num_messages <= before + 2


async def test_what_is_given_back_can_be_had_by_another_router() -> None:
    cluster = Cluster(2)
    one, other = cluster.clients
    grant = await one.acquire([want(900, 1000, "tokens")])
    assert isinstance(grant, Grant)
    assert isinstance(await other.acquire([want(500, 1000, "tokens")]), Refusal)
    one.give_back(Account("key:k", "tokens"), 800, grant.slot)
    await cluster.pass_time(1)
    assert is_granted(await other.acquire([want(500, 1000, "tokens")]))


async def test_what_was_used_beyond_a_lease_is_taken_out_of_the_minutes_to_come() -> None:
    cluster = Cluster()
    (client,) = cluster.clients
    await client.acquire([want(100, 100, "tokens")])
    client.owe(want(0, 100, "tokens"), 150)
    await cluster.pass_time(61)
    assert not is_granted(await client.acquire([want(1, 100, "tokens")]))
    await cluster.pass_time(61)
    assert is_granted(await client.acquire([want(50, 100, "tokens")]))
    assert not is_granted(await client.acquire([want(1, 100, "tokens")]))


async def test_a_place_is_free_for_all_routers_when_its_answer_has_ended() -> None:
    cluster = Cluster(2)
    one, other = cluster.clients
    assert is_granted(await one.acquire([want(1, 1, "concurrency")]))
    assert not is_granted(await other.acquire([want(1, 1, "concurrency")]))
    one.give_back(Account("key:k", "concurrency"), 1, 0)
    await one.sync()
    assert is_granted(await other.acquire([want(1, 1, "concurrency")]))


async def test_a_place_that_comes_free_among_many_is_told_of_with_what_is_said_next() -> None:
    cluster = Cluster(2)
    one, other = cluster.clients
    account = Account("key:k", "concurrency")
    grants = [await one.acquire([want(1, 10, "concurrency")]) for _ in range(4)]
    before, last = cluster.num_messages, grants[-1]
    assert isinstance(last, Grant)
    one.give_back(account, 2, last.slot)
    await asyncio.sleep(0)
    assert cluster.num_messages == before
    assert one.remaining(want(1, 10, "concurrency"))[0] == 8  # known here all the same
    await cluster.pass_time(1)
    assert is_granted(await other.acquire([want(8, 10, "concurrency")]))
    assert isinstance(await one.acquire([want(1, 10, "concurrency")]), Refusal)
    # Now that few are left, others may be waiting for it.
    before = cluster.num_messages
    one.give_back(account, 1, last.slot)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert cluster.num_messages > before
    assert is_granted(await other.acquire([want(1, 10, "concurrency")]))


async def test_places_that_few_ask_for_are_held_ahead_of_demand_and_need_no_message() -> None:
    cluster = Cluster(2)
    one, other = cluster.clients
    account, places = Account("key:k", "concurrency"), want(1, 1000, "concurrency")
    await other.acquire([want(1, 1000, "concurrency")])
    grants = [await one.acquire([places])]
    before = cluster.num_messages
    for _ in range(20):
        last = await one.acquire([places])
        assert isinstance(last, Grant)
        one.give_back(account, 1, last.slot)
    await asyncio.sleep(0)
    # Of the others the second router has one, and ten ahead of demand.
    assert (cluster.num_messages, one.remaining(places)[0]) == (before, 988)
    # Nobody asks any more: another router may have all that are free.
    await cluster.pass_time(3)
    assert all(map(is_granted, grants))
    assert is_granted(await other.acquire([want(998, 1000, "concurrency")]))
    assert not is_granted(await other.acquire([places]))


async def test_a_limit_that_is_lowered_holds_although_places_were_held_ahead() -> None:
    cluster = Cluster()
    (client,) = cluster.clients
    assert is_granted(await client.acquire([want(1, 1000, "concurrency")]))
    assert not is_granted(await client.acquire([want(1, 1, "concurrency")]))


async def test_places_of_a_router_that_died_come_back() -> None:
    cluster = Cluster(2)
    dead, alive = cluster.clients
    await dead.acquire([want(1, 1, "concurrency")])
    cluster.clients.remove(dead)
    assert not is_granted(await alive.acquire([want(1, 1, "concurrency")]))
    await cluster.pass_time(SILENCE + 1)
    assert is_granted(await alive.acquire([want(1, 1, "concurrency")]))


async def test_places_that_are_held_for_long_stay_held() -> None:
    cluster = Cluster(2)
    one, other = cluster.clients
    await one.acquire([want(1, 1, "concurrency")])
    await cluster.pass_time(10 * SILENCE)
    assert not is_granted(await other.acquire([want(1, 1, "concurrency")]))


async def test_a_caller_that_goes_away_while_it_waits_takes_nothing() -> None:
    cluster = Cluster()
    (client,) = cluster.clients
    task = asyncio.create_task(client.acquire([want(1, 1, "concurrency")]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.sync()
    assert is_granted(await client.acquire([want(1, 1, "concurrency")]))


async def test_without_a_ledger_routers_share_what_was_left() -> None:
    cluster = Cluster(2)
    for client in cluster.clients:
        await client.acquire([want(20, 100)])
    await cluster.pass_time(1)
    cluster.ledger = None

    granted = 40
    for client in cluster.clients:
        for _ in range(100):
            granted += is_granted(await client.acquire([want(1, 100)]))
    assert granted == 100


async def test_a_ledger_that_has_begun_anew_hears_what_was_spent() -> None:
    cluster = Cluster(2)
    for client in cluster.clients:
        await client.acquire([want(30, 100)])
    cluster.ledger = None
    await cluster.pass_time(2)
    for client in cluster.clients:
        assert is_granted(await client.acquire([want(5, 100)]))
    cluster.ledger = BudgetLedger("second")
    await cluster.pass_time(1)

    assert cluster.ledger.used(Account("key:k", "requests"), cluster.now) == 70
    assert not is_granted(await cluster.clients[0].acquire([want(31, 100)]))
    assert is_granted(await cluster.clients[0].acquire([want(30, 100)]))


async def test_a_ledger_that_comes_back_hears_what_was_spent_meanwhile() -> None:
    cluster = Cluster()
    (client,) = cluster.clients
    await client.acquire([want(30, 100)])
    ledger, cluster.ledger = cluster.ledger, None
    await cluster.pass_time(1)
    assert is_granted(await client.acquire([want(20, 100)]))
    cluster.ledger = ledger
    await cluster.pass_time(1)
    assert ledger is not None
    # What was given back with the message that got lost is not given back twice.
    assert 50 <= ledger.used(Account("key:k", "requests"), cluster.now) <= 51


async def test_a_ledger_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_client, "TIMEOUT", 0.02)
    cluster = Cluster()
    (client,) = cluster.clients
    cluster.is_hanging = True
    async with asyncio.timeout(5):
        assert is_granted(await client.acquire([want(1, 10)]))
        assert not is_granted(await client.acquire([want(10, 10)]))


async def test_after_a_minute_without_a_ledger_calls_of_limited_keys_are_refused() -> None:
    cluster = Cluster()
    (client,) = cluster.clients
    cluster.ledger = None
    assert is_granted(await client.acquire([want(1, 10)]))
    await cluster.pass_time(MAX_AWAY + 1)
    with pytest.raises(Unavailable):
        await client.acquire([want(1, 10)])
    cluster.ledger = BudgetLedger("second")
    await cluster.pass_time(1)
    assert is_granted(await client.acquire([want(1, 10)]))


async def test_a_router_that_closes_gives_back_what_it_holds() -> None:
    cluster = Cluster(2)
    one, other = cluster.clients
    await one.acquire([want(1, 1000), want(1, 1, "concurrency")])
    await one.close()
    assert is_granted(await other.acquire([want(1, 1, "concurrency")]))
    assert cluster.ledger is not None
    assert cluster.ledger.used(Account("key:k", "requests"), cluster.now) == 1
