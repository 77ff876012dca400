"""Whatever routers do, and whenever the ledger is away, what is held fits and comes back."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.router.tenancy.budget_client import Grant
from cluster.tenancy.leases import AHEAD, Account
from tests.cluster.router.tenancy.ledgers import Cluster, want
from tests.random_cases import num_cases

PLACES = Account("key:k", "concurrency")
TOKENS = Account("key:k", "tokens")
LIMIT = 300
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "end", "owe", "time", "away"]),
        st.integers(0, 2),
        st.integers(1, 120),
    ),
    max_size=60,
)


async def live(moves: list[tuple[str, int, int]], num_places: int) -> None:
    cluster = Cluster(3)
    ledger, is_away = cluster.ledger, False
    assert ledger is not None
    held: list[list[tuple[int, int]]] = [[], [], []]
    for kind, number, amount in moves:
        client = cluster.clients[number]
        if kind == "ask":
            wants = [want(1, num_places, "concurrency"), want(amount, LIMIT, "tokens")]
            outcome = await client.acquire(wants)
            if isinstance(outcome, Grant):
                held[number].append((amount, outcome.slot))
        elif kind == "end" and held[number]:
            taken, slot = held[number].pop()
            client.give_back(TOKENS, taken // 2, slot)
            client.give_back(PLACES, 1, slot)
        elif kind == "owe" and held[number]:
            client.owe(want(amount, LIMIT, "tokens"), amount)
        elif kind == "time":
            await cluster.pass_time(amount % 7)
        elif kind == "away":
            is_away = not is_away
            cluster.ledger = None if is_away else ledger
        if not is_away:
            for _ in range(2):  # then all know how many routers there are, and have said so
                await asyncio.gather(*(one.sync() for one in cluster.clients))
            ahead = ledger.used(PLACES, cluster.now) - sum(map(len, held))
            assert 0 <= ahead <= num_places // AHEAD
        assert all(one.remaining(want(1, LIMIT, "tokens"))[0] >= 0 for one in cluster.clients)
    cluster.ledger = ledger
    await cluster.pass_time(1)
    for client in cluster.clients:
        await client.close()
    assert ledger.used(PLACES, cluster.now) == 0


@settings(max_examples=num_cases(60), deadline=None)
@given(MOVES, st.sampled_from([4, 600]))
def test_places_are_as_many_as_are_held_and_none_is_left(
    moves: list[tuple[str, int, int]], num_places: int
) -> None:
    asyncio.run(live(moves, num_places))


@settings(max_examples=num_cases(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 80), st.integers(0, 8)), max_size=80))
def test_no_minute_has_more_tokens_than_the_limit(moves: list[tuple[int, int, int]]) -> None:
    async def run() -> None:
        cluster = Cluster(3)
        granted: list[tuple[float, int]] = []
        for number, amount, pause in moves:
            await cluster.pass_time(pause)
            if isinstance(
                await cluster.clients[number].acquire([want(amount, LIMIT, "tokens")]), Grant
            ):
                granted.append((cluster.now, amount))
        for start, _ in granted:
            in_a_minute = sum(amount for at, amount in granted if start <= at < start + 60)
            assert in_a_minute <= LIMIT * 1.03

    asyncio.run(run())
