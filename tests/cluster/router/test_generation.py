"""Streams whose schedulers are lost or leave: what goes on and what ends."""

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from cluster.errors import ErrorInfo, Unavailable
from cluster.request import Request
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer
from tests.cluster.router.calls import (
    CONFIG,
    PLAIN,
    World,
    begin,
    choice,
    finish,
    undisturbed,
)
from tests.patience import PATIENCE

NO_RANKS = ErrorInfo("Unavailable", "the ranks are down", retry_after=5)
SHORT = replace(CONFIG, recovery_timeout=0.05)


def dies_once(after: int) -> FakeScheduler:
    """Return a scheduler whose connections die after so many tokens of answers begun here."""
    return FakeScheduler(lambda one: Script(dies_after=None if one.output_token_ids else after))


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 7])
async def test_a_stream_outlives_the_connection_to_its_only_scheduler(
    tokenizer: Tokenizer, num_tokens: int
) -> None:
    deaths = [num_tokens]
    fake = FakeScheduler(lambda _: Script(dies_after=deaths.pop() if deaths else None))
    async with World(tokenizer, fake) as world:
        assert await world.answers((choice(),)) == await undisturbed(tokenizer, (choice(),))
        first, second = fake.submitted
        assert len(second.output_token_ids) == num_tokens
        assert second == structs.replace(
            first,
            request_id="r.1",
            output_token_ids=second.output_token_ids,
            elapsed=second.elapsed,
        )
        assert second.elapsed > 0, "its time limit goes on"
        assert world.counted("stream_continuations") == {("died",): 1}
        pauses = world.metrics.counts("r").histograms["stream_interruption_seconds"]
        assert pauses.number == (1 if num_tokens else 0)


async def test_a_stream_goes_on_in_a_scheduler_that_comes_in_place_of_a_killed_one(
    tokenizer: Tokenizer,
) -> None:
    fake = FakeScheduler(lambda _: Script(pauses_after=3))
    async with World(tokenizer, fake) as world:
        with world.generation((choice(),)) as generation:
            begun = await begin(generation, 3)
            await fake.close()
            world.backend.addresses = ()
            replacement = FakeScheduler(replica="new")
            world.fakes[:] = [replacement]
            await world.open(replacement)
            answers = await finish(generation, begun)
        assert answers == await undisturbed(tokenizer, (choice(),))
        assert [len(one.output_token_ids) for one in replacement.submitted] == [3]


async def test_choices_that_have_not_ended_go_on_together_and_each_behind_its_tokens(
    tokenizer: Tokenizer,
) -> None:
    choices = tuple(choice(f"r{n}", seed=n, max_tokens=n) for n in range(2, 6))

    def script(request: Request) -> Script:
        dies = not request.output_token_ids and request.max_tokens == 5
        return Script(dies_after=4 if dies else None)

    fake = FakeScheduler(script)
    async with World(tokenizer, fake) as world:
        answers = await world.answers(choices)
        assert answers == await undisturbed(tokenizer, choices)
        again = fake.submits[1]
        assert {(one.max_tokens, len(one.output_token_ids)) for one in again} <= {
            (3, 2), (4, 3), (5, 3), (5, 4),
        }  # fmt: skip
        assert len(fake.submits) == 2


async def test_all_tokens_that_came_are_sent_again_those_with_held_back_text_too(
    tokenizer: Tokenizer,
) -> None:
    tokens = tokenizer.encode("one ST🌳", False)  # "ST" may grow into the stop string
    for num_tokens in range(1, len(tokens)):

        def script(request: Request, dies_after: int = num_tokens) -> Script:
            return Script(tokens, dies_after=None if request.output_token_ids else dies_after)

        fake = FakeScheduler(script)
        async with World(tokenizer, fake) as world:
            options = replace(PLAIN, stops=("STOP",))
            (answer,) = await world.answers((choice(max_tokens=30),), options=options)
            assert fake.submitted[1].output_token_ids == tokens[:num_tokens]
            assert answer.text == "one ST🌳"


async def test_a_stop_string_over_the_cut_is_found(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one STOP two", False)
    cut = len(tokenizer.encode("one ST", False))
    fake = FakeScheduler(
        lambda one: Script(tokens, dies_after=None if one.output_token_ids else cut)
    )
    async with World(tokenizer, fake) as world:
        (answer,) = await world.answers((choice(),), options=replace(PLAIN, stops=("STOP",)))
        assert (answer.text, answer.ends) == ("one ", [("stop", "STOP")])


async def test_an_answer_whose_last_token_is_here_needs_no_scheduler_to_end(
    tokenizer: Tokenizer,
) -> None:
    letter = tokenizer.encode("Z", False)
    told = tokenizer.encode("ab", False)
    fake = FakeScheduler(lambda one: Script(told + letter, forgets_end=True))
    async with World(tokenizer, fake) as world:
        stopped = choice("stopped", stop_token_ids=letter)
        (answer,) = await world.answers((stopped,))
        assert (answer.text, answer.ends) == ("ab", [("stop", letter[0])])
        (answer,) = await world.answers((choice("full", max_tokens=3),))
        assert (answer.text, answer.ends) == ("abZ", [("length", None)])
        await fake.wait_until(lambda one: one.aborted == ["stopped", "full"])
        assert len(fake.submitted) == 2


async def test_prompts_of_one_call_are_lost_and_go_on_each_for_itself(tokenizer: Tokenizer) -> None:
    prompts = [(choice(f"p{n}", (n, 9), max_tokens=20),) for n in range(8)]
    lost, kept = dies_once(2), FakeScheduler(replica="1")
    lost.replica = "0"
    async with World(tokenizer, lost, kept) as world:
        assert await world.answers(*prompts) == await undisturbed(tokenizer, *prompts)
        assert lost.submitted and kept.submitted


async def test_a_stream_that_is_answered_unavailable_goes_on_elsewhere(
    tokenizer: Tokenizer,
) -> None:
    answer = await undisturbed(tokenizer, (choice(),))
    tokens = tuple(answer[0].token_ids)
    fakes = [FakeScheduler(lambda _: Script(tokens[:3], NO_RANKS), replica="0")]
    async with World(tokenizer, *fakes) as world:
        fakes.append(FakeScheduler(replica="1"))
        with world.generation((choice(),)) as generation:
            begun = await begin(generation, 3)
            world.fakes.append(fakes[1])
            await world.open(fakes[1])
            assert await finish(generation, begun) == answer
        assert [len(one.output_token_ids) for one in fakes[1].submitted] == [3]
        assert world.counted("stream_continuations") == {("unavailable",): 1}


async def test_a_stream_waits_for_ranks_that_are_starting_until_they_are_up(
    tokenizer: Tokenizer,
) -> None:
    fake = FakeScheduler(lambda _: Script(pauses_after=3))
    async with World(tokenizer, fake) as world:
        with world.generation((choice(),)) as generation:
            begun = await begin(generation, 3)
            fake.reason, fake.is_starting = "the ranks are starting", True
            await world.restart(fake)
            receiving = asyncio.create_task(finish(generation, begun))
            await fake.wait_until(lambda one: one.num_routers > 0)
            await world.replicas.reports()
            assert len(fake.submitted) == 1
            fake.resume()
            fake.reason, fake.is_starting = "", False
            assert await receiving == await undisturbed(tokenizer, (choice(),))


async def test_calls_of_a_new_router_wait_for_a_scheduler_that_comes_in_place_of_another(
    tokenizer: Tokenizer,
) -> None:
    fake = FakeScheduler()
    fake.reason, fake.is_starting = "the ranks are starting", True
    world = World(tokenizer, fake)
    world.backend.seconds_since_left = 10.0
    async with world:
        await world.replicas.reports()
        answering = asyncio.create_task(world.answers((choice(),)))
        await asyncio.sleep(0)
        assert not fake.submitted and not answering.done()
        fake.reason, fake.is_starting = "", False
        await world.replicas.reports()
        assert await answering == await undisturbed(tokenizer, (choice(),))


@pytest.mark.parametrize("seconds_since_left", [None, 1e6])
async def test_calls_of_a_new_router_are_refused_while_a_scheduler_starts_in_nobodys_place(
    tokenizer: Tokenizer, seconds_since_left: float | None
) -> None:
    fake = FakeScheduler(lambda _: Script(error=NO_RANKS))
    fake.reason, fake.is_starting = "the ranks are starting", True
    world = World(tokenizer, fake)
    world.backend.seconds_since_left = seconds_since_left
    async with world:
        await world.replicas.reports()
        with pytest.raises(Unavailable, match="the ranks are down"):
            await world.answers((choice(),))


async def test_ranks_that_are_on_their_way_back_are_given_streams_and_calls_to_keep(
    tokenizer: Tokenizer,
) -> None:
    fake = dies_once(3)
    fake.reason = "the ranks are being restarted"
    async with World(tokenizer, fake) as world:
        assert await world.answers((choice(),)) == await undisturbed(tokenizer, (choice(),))
        assert len(fake.submitted) == 2


async def test_a_lost_call_without_tokens_waits_for_a_scheduler_too(tokenizer: Tokenizer) -> None:
    fake = FakeScheduler(lambda _: Script(is_silent=True))
    async with World(tokenizer, fake) as world:
        with world.generation((choice(),)) as generation:
            receiving = asyncio.create_task(finish(generation))
            await fake.wait_until(lambda one: bool(one.submitted))
            await fake.close()
            world.backend.addresses = ()
            other = FakeScheduler(replica="1")
            world.fakes[:] = [other]
            await world.open(other)
            assert await receiving == await undisturbed(tokenizer, (choice(),))


async def test_a_stream_that_nobody_takes_in_time_ends_with_the_last_error_after_its_tokens(
    tokenizer: Tokenizer,
) -> None:
    fake = FakeScheduler(lambda _: Script(pauses_after=3))
    async with World(tokenizer, fake, config=SHORT) as world:
        generation = world.generation((choice(),))
        with pytest.raises(Unavailable, match="was lost: its connection closed"), generation:
            begun = await begin(generation, 3)
            await fake.close()
            await finish(generation, begun)
        assert world.counted("requests") == {("m", "m", "Unavailable"): 1}


async def test_a_scheduler_that_loses_a_stream_again_and_again_does_not_hold_it_for_ever(
    tokenizer: Tokenizer,
) -> None:
    fake = FakeScheduler(lambda one: Script(dies_after=max(3, len(one.output_token_ids))))
    async with World(tokenizer, fake, config=SHORT) as world:
        with pytest.raises(Unavailable, match="was lost"):
            await world.answers((choice(),))
        assert {len(one.output_token_ids) for one in fake.submitted} == {0, 3}


async def test_a_scheduler_that_is_stopped_loses_its_streams_to_another(
    tokenizer: Tokenizer,
) -> None:
    fakes = [FakeScheduler(lambda _: Script(pauses_after=3), replica=name) for name in "ab"]
    config = replace(CONFIG, scheduler_timeout=0.2, health_timeout=0.2)
    async with World(tokenizer, *fakes, config=config) as world:
        with world.generation((choice(),)) as generation:
            begun = await begin(generation, 3)
            stopped, other = fakes if fakes[0].submitted else fakes[::-1]
            other.resume()
            stopped.is_hung = True
            answers = await finish(generation, begun)
            stopped.resume()  # what it has drawn meanwhile is nobody's
            stopped.is_hung = False
        assert answers == await undisturbed(tokenizer, (choice(),))
        assert world.counted("stream_continuations") == {("hung",): 1}


async def test_streams_move_from_a_scheduler_that_leaves_to_another_that_is_ready(
    tokenizer: Tokenizer,
) -> None:
    choices = (choice("a"), choice("b", seed=1))
    leaving = FakeScheduler(lambda _: Script(pauses_after=3), replica="0")
    async with World(tokenizer, leaving) as world:
        with world.generation(choices) as generation:
            begun = await begin(generation, 3)
            leaving.leave()
            async with asyncio.timeout(PATIENCE):
                while not world.replicas.clients[0].is_leaving:
                    await asyncio.sleep(0)
            assert not leaving.aborted  # there is nobody else yet
            other = FakeScheduler(replica="1")
            world.fakes.append(other)
            await world.open(other)
            answers = await finish(generation, begun)
        assert answers == await undisturbed(tokenizer, choices)
        assert sorted(leaving.aborted) == ["a", "b"]
        assert [len(one) for one in other.submits] == [2]
        assert world.counted("stream_continuations") == {("leaving",): 2}
        await leaving.wait_until(lambda one: one.num_routers == 0)


async def test_streams_of_a_lone_scheduler_that_leaves_stay_until_they_end(
    tokenizer: Tokenizer,
) -> None:
    leaving = FakeScheduler(lambda _: Script(pauses_after=3))
    async with World(tokenizer, leaving) as world:
        with world.generation((choice(),)) as generation:
            begun = await begin(generation, 3)
            leaving.leave()
            leaving.resume()
            answers = await finish(generation, begun)
        assert answers == await undisturbed(tokenizer, (choice(),))
        await leaving.wait_until(lambda one: one.num_routers == 0)
        assert len(leaving.submitted) == 1 and not leaving.aborted


async def test_a_client_that_leaves_while_its_stream_waits_leaves_nothing_behind(
    tokenizer: Tokenizer,
) -> None:
    fake = FakeScheduler(lambda _: Script(pauses_after=3))
    async with World(tokenizer, fake) as world:
        with world.generation((choice(),)) as generation:
            begun = await begin(generation, 3)
            await fake.close()
            waiting = asyncio.create_task(finish(generation, begun))
            async with asyncio.timeout(PATIENCE):
                while not world.replicas._listeners:
                    await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert not world.replicas._listeners
        await world.restart(fake)
        await fake.wait_until(lambda one: one.num_routers > 0)
        await world.replicas.reports()
        assert len(fake.submitted) == 1
