"""Calls that outlive their reader: kept for a while, claimed by another with nothing lost."""

import asyncio

from cluster.messages import Claim, Claimed, Detach, Events, Keep, Submit, UnreadUsage
from tests.cluster.engine.small_engine import (
    RouterEnd,
    World,
    ask_choices,
    expected,
    token_ids,
    until_ready,
    world_with,
)
from tests.patience import PATIENCE

RECORD = b"whose it is"


def ask_kept(*names: str, seconds: float = PATIENCE, n: int = 60) -> Submit:
    requests = ask_choices(*names, n=n, length=10).requests
    return Submit(requests, Keep("secret", seconds, RECORD))


async def claimed(router: RouterEnd, stream_id: str = "secret") -> Claimed:
    router.send(Claim(9, stream_id, "new"))
    while not isinstance(message := await router.receive(), Claimed):
        pass
    return message


async def begun(world: World, submit: Submit) -> RouterEnd:
    """Connect a router and let a call of it begin."""
    router = await world.connect()
    await until_ready(router)
    router.send(submit)
    while not isinstance(await router.receive(), Events):
        pass
    return router


async def whole(router: RouterEnd, answer: Claimed) -> list[tuple[int, ...]]:
    """Return all tokens of each choice: what was told at the claim, and what follows."""
    names = [f"new/{index}" for index in range(len(answer.requests))]
    open_names = [
        name
        for name, events in zip(names, answer.events, strict=True)
        if not events or events[-1].finish_reason is None
    ]
    later = await router.collect(*open_names)
    return [
        token_ids([*events, *later.get(name, [])])
        for name, events in zip(names, answer.events, strict=True)
    ]


CHOICES = [expected(n=60, length=10, seed=seed) for seed in range(2)]


async def test_a_call_whose_router_dies_is_claimed_by_another_and_goes_on() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        first.close()
        answer = await claimed(second)
        assert answer.record == RECORD
        assert [request.request_id for request in answer.requests] == ["a", "b"]
        assert await whole(second, answer) == CHOICES


async def test_a_call_that_ends_while_nobody_reads_is_there_for_a_while() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        first.send(Detach("secret"))
        async with asyncio.timeout(PATIENCE):
            while (await second.status()).scheduler.num_running:
                await asyncio.sleep(0.01)
        for _ in range(2):  # its reader may be lost again
            answer = await claimed(second)
            assert [token_ids(list(events)) for events in answer.events] == CHOICES


async def unread(router: RouterEnd) -> UnreadUsage:
    async with asyncio.timeout(PATIENCE):
        while not isinstance(message := await router.receive(), UnreadUsage):
            pass
    return message


async def told_to(router: RouterEnd, world: World) -> list[int]:
    """Let the ranks stand still, close a router, and return what it had had of each choice."""
    rank = world.launcher.handles[0].rank
    rank.hangs.set()
    router.close()
    kept = world.engine._dispatcher._kept.get("secret")
    assert kept is not None
    async with asyncio.timeout(PATIENCE):
        while world.engine._dispatcher._by_router:
            await asyncio.sleep(0.01)
    told = list(kept.num_told)
    rank.hangs.clear()
    rank.freed.set()
    return told


async def test_what_no_router_had_is_told_once_to_the_next_one_that_asks_something() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        told = await told_to(first, world)
        async with asyncio.timeout(PATIENCE):
            while (await second.status()).scheduler.num_running:
                await asyncio.sleep(0.01)
        second.send(ask_choices("c", n=1))
        message = await unread(second)
        assert message.usage.generation_tokens == 120 - sum(told)
        assert message.usage.requests == sum(count == 0 for count in told)
        answer = await claimed(second)
        assert answer.told == (60, 60)  # who reads it now counts nothing


async def test_who_claims_a_call_is_told_what_others_have_counted() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        told = await told_to(first, world)
        answer = await claimed(second)
        assert list(answer.told) == told
        assert await whole(second, answer) == CHOICES
        second.send(ask_choices("c", n=1))
        await second.collect("c")
        assert world.engine._dispatcher._unread == {}


async def test_a_claim_that_is_taken_back_has_counted_nothing() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        told = await told_to(first, world)
        answer = await claimed(second)
        second.send(Detach("secret", told=answer.told))
        assert list((await claimed(second)).told) == told


async def test_a_claim_that_is_taken_back_after_the_end_gives_back_what_it_was_sent() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        await told_to(first, world)
        answer = await claimed(second)
        await whole(second, answer)
        second.send(Detach("secret", told=answer.told))
        usage = (await unread(second)).usage
        assert usage.generation_tokens == 120 - sum(answer.told)
        assert (await claimed(second)).told == (60, 60)


async def test_whoever_claims_a_call_that_ended_unread_is_told_its_usage_though_nobody_asks() -> (
    None
):
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        told = await told_to(first, world)
        async with asyncio.timeout(PATIENCE):
            while (await second.status()).scheduler.num_running:
                await asyncio.sleep(0)
        await claimed(second)
        assert (await unread(second)).usage.generation_tokens == 120 - sum(told)


async def test_a_router_that_follows_hears_the_end_of_a_call_that_nobody_claims() -> None:
    async with world_with() as world:
        first = await begun(world, ask_kept("a", seconds=0.05, n=110))
        world.launcher.handles[0].rank.hangs.set()
        first.send(Detach("secret", follows=True))
        events = (await first.collect("a"))["a"]
        assert events[-1].finish_reason == "abort"
        world.launcher.handles[0].rank.hangs.clear()
        world.launcher.handles[0].rank.freed.set()


async def test_a_reader_that_leaves_after_another_has_claimed_changes_nothing() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        answer = await claimed(second)
        first.send(Detach("secret"))
        assert await whole(second, answer) == CHOICES


async def test_a_call_that_nobody_claims_in_time_ends() -> None:
    async with world_with() as world:
        first = await begun(world, ask_kept("a", seconds=0.05, n=110))
        second = await world.connect()
        world.launcher.handles[0].rank.hangs.set()
        first.close()
        async with asyncio.timeout(PATIENCE):
            while (await claimed(second)).requests:
                await asyncio.sleep(0.1)
        world.launcher.handles[0].rank.hangs.clear()
        world.launcher.handles[0].rank.freed.set()
        async with asyncio.timeout(PATIENCE):
            while (stats := (await second.status()).scheduler).num_running:
                await asyncio.sleep(0.01)
        assert stats.held_pages == 0
        assert world.engine._dispatcher.num_streams == 0


async def test_whoever_claims_a_call_that_is_read_takes_it_over() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        answer = await claimed(second)
        told = await first.collect("a", "b")
        assert {events[-1].error.name for events in told.values() if events[-1].error} == {
            "Conflict"
        }
        assert await whole(second, answer) == CHOICES


async def test_a_call_that_is_kept_outlives_its_ranks_too() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        first.close()
        world.launcher.handles[1].rank.fails = True
        assert await whole(second, await claimed(second)) == CHOICES


async def test_a_call_that_nobody_asked_to_keep_cannot_be_claimed() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_choices("a", n=60)), await world.connect()
        assert not (await claimed(second)).requests
        assert not (await claimed(second, "a")).requests
        first.close()
        async with asyncio.timeout(PATIENCE):
            while (await second.status()).scheduler.num_running:
                await asyncio.sleep(0.01)
