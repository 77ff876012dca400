"""What schedulers refuse, or have no room for: what is tried elsewhere and what ends."""

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import ErrorInfo, Internal, InvalidRequest, Overloaded, Unavailable
from cluster.request import Request
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer
from tests.cluster.router.calls import (
    CONFIG,
    World,
    choice,
    finish,
    undisturbed,
)
from tests.patience import PATIENCE

NO_RANKS = ErrorInfo("Unavailable", "the ranks are down", retry_after=5)
FULL = ErrorInfo("Overloaded", "the queue is full", retry_after=1)
SHORT = replace(CONFIG, recovery_timeout=0.05)


async def test_a_full_queue_does_not_end_what_was_let_in_before(tokenizer: Tokenizer) -> None:
    (answer,) = await undisturbed(tokenizer, (choice(),))
    tokens = tuple(answer.token_ids)
    errors = [FULL, NO_RANKS, FULL]

    def script(request: Request) -> Script:
        num_tokens = len(request.output_token_ids)
        if not num_tokens:
            return Script(dies_after=3)
        return Script(tokens[:num_tokens], errors.pop()) if errors else Script()

    fake = FakeScheduler(script)
    async with World(tokenizer, fake) as world:
        assert await world.answers((choice(),)) == [answer]
        assert not errors


async def test_a_queue_that_stays_full_ends_a_stream_when_its_time_is_over(
    tokenizer: Tokenizer,
) -> None:
    def script(request: Request) -> Script:
        given = request.output_token_ids
        return Script(given, FULL) if given else Script(dies_after=3)

    async with World(tokenizer, FakeScheduler(script), config=SHORT) as world:
        with pytest.raises(Overloaded, match="the queue is full"):
            await world.answers((choice(),))


async def test_a_full_queue_ends_a_call_that_was_never_let_in(tokenizer: Tokenizer) -> None:
    fakes = [FakeScheduler(lambda _: Script(error=FULL), replica=name) for name in "ab"]
    async with World(tokenizer, *fakes) as world:
        with pytest.raises(Overloaded, match="the queue is full"):
            await world.answers((choice(),))
        assert sum(len(fake.submitted) for fake in fakes) == 1


async def test_a_new_call_waits_for_a_scheduler_that_was_there_a_moment_ago(
    tokenizer: Tokenizer,
) -> None:
    fake = FakeScheduler(replica="a")
    async with World(tokenizer, fake) as world:
        await world.answers((choice(),))
        await fake.close()
        world.backend.addresses = ()
        with world.generation((choice(), choice("s", seed=1)), (choice("t", (8, 9)),)) as call:
            receiving = asyncio.create_task(finish(call))
            other = FakeScheduler(replica="b")
            world.fakes[:] = [other]
            await world.open(other)
            expected = [(choice(), choice("s", seed=1)), (choice("t", (8, 9)),)]
            assert await receiving == await undisturbed(tokenizer, *expected)
        assert world.counted("stream_continuations") == {}, "nothing was interrupted"


async def test_a_new_call_does_not_wait_where_no_scheduler_has_been_for_long(
    tokenizer: Tokenizer,
) -> None:
    async with World(tokenizer) as world:
        with pytest.raises(Unavailable, match="no scheduler is up"):
            await world.answers((choice(),))
    fake = FakeScheduler()
    async with World(tokenizer, fake, config=SHORT) as world:
        await fake.close()
        world.backend.addresses = ()
        with pytest.raises(Unavailable, match="no scheduler is up|was lost"):
            await world.answers((choice(),))
        with pytest.raises(Unavailable, match="no scheduler is up"):
            await world.answers((choice(),))


@pytest.mark.parametrize("name", ["Internal", "InvalidRequest"])
async def test_other_errors_end_a_stream(tokenizer: Tokenizer, name: str) -> None:
    fake = FakeScheduler(lambda _: Script((5, 6), ErrorInfo(name, "NaN")))
    async with World(tokenizer, fake) as world:
        with pytest.raises((Internal, InvalidRequest), match="NaN"):
            await world.answers((choice(),))
        assert len(fake.submitted) == 1


async def test_a_refused_call_is_tried_at_each_other_scheduler_once_then_ends_with_the_reason(
    tokenizer: Tokenizer,
) -> None:
    refusing = [FakeScheduler(lambda _: Script(error=NO_RANKS), replica=name) for name in "abc"]
    async with World(tokenizer, *refusing) as world:
        with pytest.raises(Unavailable, match="the ranks are down"):
            await world.answers((choice(),))
        assert [len(fake.submitted) for fake in refusing] == [1, 1, 1]
        good = FakeScheduler(replica="d")
        world.fakes.append(good)
        await world.open(good)
        await world.replicas.refresh()
        assert await world.answers((choice(),)) == await undisturbed(tokenizer, (choice(),))


async def test_a_call_goes_back_to_no_scheduler_that_has_refused_it(tokenizer: Tokenizer) -> None:
    refused: list[str] = []

    def script(request: Request) -> Script:
        refused.append(request.request_id)
        return Script(error=NO_RANKS, pauses_after=0 if len(refused) > 1 else None)

    fakes = [FakeScheduler(script, replica=name) for name in "ab"]
    async with World(tokenizer, *fakes) as world:
        with pytest.raises(Unavailable), world.generation((choice(),)) as generation:
            receiving = asyncio.create_task(finish(generation))
            async with asyncio.timeout(PATIENCE):
                while len(refused) < 2 or not all(one.is_ready for one in world.replicas.clients):
                    await asyncio.sleep(0)
            for fake in fakes:
                fake.resume()
            await receiving
        assert refused == ["r", "r.1"]
