"""Grammars that ranks compile: streams of others go on meanwhile, and nothing of a call is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace
from ray.exceptions import WorkerCrashedError

from cluster.messages import (
    Abort,
    Claim,
    Claimed,
    Detach,
    Keep,
    Submit,
    Unload,
)
from tests.cluster.engine.small_engine import (
    RouterEnd,
    World,
    ask,
    ask_choices,
    ends_until_unloaded,
    expected,
    token_ids,
    until_ready,
    world_with,
)
from tests.patience import PATIENCE
from worker.testing.fake_rank import fake_continuation

GRAMMAR = "a form"


def formed(submit: Submit, keep: Keep | None = None, grammar: str = GRAMMAR) -> Submit:
    """Return a call with a grammar."""
    requests = tuple(
        replace(one, sampling=replace(one.sampling, grammar=grammar)) for one in submit.requests
    )
    return Submit(requests, keep)


def formed_tokens(adapter: str | None = None, n: int = 6) -> tuple[int, ...]:
    return fake_continuation(adapter, tuple(range(3, 12)), n, grammar=GRAMMAR)


class Compiler:
    """Compiles nothing before it is let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_done = asyncio.Event()
        self.fails = False

    async def __call__(self, grammar: str) -> bool:
        self.asked.append(grammar)
        if len(self.asked) == 1:
            return False  # as a rank says after a moment
        await self.is_done.wait()
        if self.fails:
            raise WorkerCrashedError
        return True


@asynccontextmanager
async def compiling(*digests: str) -> AsyncIterator[tuple[World, RouterEnd, Compiler]]:
    async with world_with(*digests) as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.handles[0].compiler = compiler = Compiler()
        yield world, router, compiler
        compiler.is_done.set()


async def asked(compiler: Compiler, count: int = 2) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(compiler.asked) < count:
            await asyncio.sleep(0)


async def test_streams_begin_and_end_while_a_grammar_is_compiled() -> None:
    async with compiling() as (_, router, compiler):
        router.send(ask("running", n=40))
        await router.receive()
        router.send(formed(ask("formed")))
        await asked(compiler)
        router.send(ask("later", n=40))
        events = await router.collect("running", "later")
        assert token_ids(events["running"]) == token_ids(events["later"]) == expected(n=40)
        assert "formed" not in router._events
        assert (await router.status()).scheduler.num_running == 0
        compiler.is_done.set()
        assert token_ids((await router.collect("formed"))["formed"]) == formed_tokens()


async def test_a_grammar_is_compiled_once_for_each_launch_of_the_ranks() -> None:
    async with compiling() as (world, router, compiler):
        compiler.is_done.set()
        for name in "abc":
            router.send(formed(ask(name)))
            assert token_ids((await router.collect(name))[name]) == formed_tokens()
        assert compiler.asked == [GRAMMAR, GRAMMAR]  # not yet; done
        world.launcher.handles[1].rank.fails = True
        router.send(ask("lost"))
        assert token_ids((await router.collect("lost"))["lost"]) == expected()
        world.launcher.handles[0].compiler = again = Compiler()
        again.is_done.set()
        router.send(formed(ask("d")))
        assert token_ids((await router.collect("d"))["d"]) == formed_tokens()
        assert again.asked == [GRAMMAR, GRAMMAR]


async def test_what_is_dropped_while_its_grammar_is_compiled_never_begins() -> None:
    async with compiling() as (world, router, compiler):
        other = await world.connect()
        router.send(formed(ask("gone")))
        router.send(formed(ask_choices("one", "two")))
        other.send(formed(ask("of a router that goes"), grammar="another"))
        await asked(compiler, 4)
        router.send(Abort("gone"))
        router.send(Abort("one"))
        other.close()
        async with asyncio.timeout(PATIENCE):
            while world.engine._gate.num_held > 1:
                await asyncio.sleep(0)
        compiler.is_done.set()
        two = (await router.collect("two"))["two"]
        counted = (await router.status()).scheduler.counters.generated_tokens
        assert counted == len(token_ids(two)) == 6


async def test_a_kept_call_is_claimed_when_its_grammar_is_compiled() -> None:
    async with compiling() as (world, router, compiler):
        second = await world.connect()
        router.send(formed(ask("a"), Keep("secret", PATIENCE, b"whose")))
        await asked(compiler)
        second.send(Claim(9, "secret", "new"))
        await second.status()  # the claim has been read
        compiler.is_done.set()
        while not isinstance(answer := await second.receive(), Claimed):
            pass
        assert answer.record == b"whose"
        assert token_ids((await second.collect("new/0"))["new/0"]) == formed_tokens()


async def test_a_kept_call_whose_router_goes_is_kept() -> None:
    async with compiling() as (world, router, compiler):
        second = await world.connect()
        router.send(formed(ask("a"), Keep("secret", PATIENCE, b"whose")))
        await asked(compiler)
        router.send(Detach("secret"))
        router.close()
        await second.status()
        compiler.is_done.set()
        second.send(Claim(9, "secret", "new"))
        while not isinstance(answer := await second.receive(), Claimed):
            pass
        told = [event for events in answer.events for event in events]
        left = [] if told and told[-1].finish_reason else (await second.collect("new/0"))["new/0"]
        assert token_ids([*told, *left]) == formed_tokens()


async def test_a_rank_that_dies_as_it_compiles_holds_nobody_up() -> None:
    async with compiling() as (_, router, compiler):
        compiler.fails = True
        router.send(formed(ask("a")))
        await asked(compiler)
        compiler.is_done.set()
        assert token_ids((await router.collect("a"))["a"]) == formed_tokens()


async def test_an_unload_waits_for_calls_whose_grammar_was_being_compiled_before_it() -> None:
    async with compiling("cafe") as (_, router, compiler):
        router.send(formed(ask("a", "cafe")))
        router.send(formed(ask("b", "cafe")))
        await asked(compiler)
        router.send(Unload(5, "cafe"))
        await router.status()  # the unload has been read
        compiler.is_done.set()
        assert await ends_until_unloaded(router) == ["a", "b"]
        assert token_ids((await router.collect("a"))["a"]) == formed_tokens("cafe")


async def test_an_unload_goes_on_when_a_call_whose_grammar_is_being_compiled_is_dropped() -> None:
    async with compiling("cafe") as (_, router, compiler):
        router.send(formed(ask("a", "cafe")))
        await asked(compiler)
        router.send(Unload(5, "cafe"))
        router.send(Abort("a"))
        assert await ends_until_unloaded(router) == []


async def test_a_forced_unload_does_not_wait_for_a_grammar() -> None:
    async with compiling("cafe") as (_, router, compiler):
        router.send(formed(ask("a", "cafe")))
        await asked(compiler)
        router.send(Unload(5, "cafe", force=True))
        assert await ends_until_unloaded(router) == []
