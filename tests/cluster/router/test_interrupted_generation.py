"""Random calls over schedulers that fail at random moments, held against an undisturbed run."""

import asyncio
import itertools
from dataclasses import dataclass, replace
from typing import Literal

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cluster.errors import ErrorInfo
from cluster.request import Request
from cluster.router.output_processor import TextOptions
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer
from tests.cluster.router.calls import Answer, World, choice
from tests.patience import PATIENCE
from tests.random_cases import num_cases

NO_RANKS = ErrorInfo("Unavailable", "the ranks are down", retry_after=5)
FULL = ErrorInfo("Overloaded", "the queue is full", retry_after=1)


@dataclass(frozen=True)
class Fault:
    """What a scheduler does to a request that is submitted to it."""

    kind: Literal["dies", "refuses", "is full"]
    after: int  # tokens that it sends before


@dataclass(frozen=True)
class Loss:
    """What becomes of a whole scheduler; another one comes in its place."""

    kind: Literal["killed", "leaves"]
    after: int  # times that the call has received something
    number: int  # of the scheduler


@dataclass(frozen=True)
class Case:
    """One call and what its schedulers do to it."""

    prompts: tuple[tuple[Request, ...], ...]
    tokens: tuple[tuple[int, ...], ...]  # of each answer, by the seed of its request
    options: TextOptions
    num_schedulers: int
    faults: tuple[Fault, ...] = ()  # one for each time that a request is submitted
    losses: tuple[Loss, ...] = ()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_choices = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    max_tokens = draw(st.integers(1, 16))
    stop_token_ids = tuple(sorted(draw(st.sets(st.integers(3, 60), max_size=2))))
    num_logprobs = draw(st.sampled_from([None, 0, 2]))
    seeds = iter(range(sum(num_choices)))
    prompts = tuple(
        tuple(
            choice(
                f"r{seed}",
                (5, 6, number),
                seed=seed,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                num_logprobs=num_logprobs,
            )
            for seed in itertools.islice(seeds, count)
        )
        for number, count in enumerate(num_choices)
    )
    answer = st.lists(st.integers(3, 319), min_size=max_tokens, max_size=max_tokens).map(tuple)
    stop = st.text("ethoqu k", min_size=1, max_size=3)
    options = st.builds(
        TextOptions,
        stops=st.lists(stop, max_size=2).map(tuple),
        include_stop=st.booleans(),
        skip_special_tokens=st.booleans(),
        min_tokens=st.integers(0, 2),
    )
    num_schedulers = draw(st.integers(1, 3))
    fault = st.builds(
        Fault, st.sampled_from(("dies", "refuses", "is full")), after=st.integers(0, 6)
    )
    loss = st.builds(
        Loss,
        st.sampled_from(("killed", "leaves")),
        after=st.integers(0, 12),
        number=st.integers(0, num_schedulers - 1),
    )
    return Case(
        prompts,
        tuple(draw(answer) for _ in range(sum(num_choices))),
        draw(options),
        num_schedulers,
        tuple(draw(st.lists(fault, max_size=8))),
        tuple(draw(st.lists(loss, max_size=3))),
    )


def script_of(tokens: tuple[int, ...]) -> Script:
    logprobs = tuple(-token / 7 - position for position, token in enumerate(tokens))
    return Script(tokens, logprobs=logprobs, num_cached_tokens=2)


class Run:
    """One run of a case; without its faults and losses, the undisturbed one."""

    def __init__(self, case: Case, tokenizer: Tokenizer) -> None:
        self._case = case
        self._faults = list(case.faults)
        self._losses = list(case.losses)
        self._names = itertools.count()
        self._current = [self._scheduler() for _ in range(case.num_schedulers)]
        self._world = World(tokenizer, *self._current)

    async def outcome(self) -> list[tuple[Answer, int, int]]:
        """Return each answer with its numbers of tokens and of cached tokens."""
        case = self._case
        answers = [Answer() for _ in case.tokens]
        async with self._world as world, asyncio.timeout(PATIENCE):
            with world.generation(*case.prompts, options=case.options) as generation:
                num_received = 0
                while generation.is_running:
                    for index, delta in await generation.receive():
                        answers[index].add(delta)
                    num_received += 1
                    await self._lose(num_received)
        return [
            (answer, one.num_tokens, one.num_cached_tokens)
            for answer, one in zip(answers, generation.processors, strict=True)
        ]

    def _scheduler(self) -> FakeScheduler:
        return FakeScheduler(self._script, replica=str(next(self._names)))

    def _script(self, request: Request) -> Script:
        """Return what a scheduler does to a request, by the next fault."""
        tokens = self._case.tokens[request.sampling.seed]
        num_given = len(request.output_token_ids)
        assert request.output_token_ids == tokens[:num_given], "not the tokens that came"
        script = script_of(tokens)
        if not self._faults:
            return script
        fault = self._faults.pop()
        cut = num_given + fault.after
        match fault.kind:
            case "dies":
                event("dies")
                return replace(script, dies_after=cut)
            # A call that has got nothing is refused for good, if all refuse it or one is full.
            case "refuses" if 0 < cut < len(tokens):
                event("refuses")
                return replace(script, tokens=tokens[:cut], error=NO_RANKS)
            case "is full" if num_given:
                event("is full")
                return replace(script, tokens=tokens[:num_given], error=FULL)
        return script

    async def _lose(self, num_received: int) -> None:
        """Let go what is due."""
        world = self._world
        for loss in [one for one in self._losses if one.after <= num_received]:
            self._losses.remove(loss)
            event(loss.kind)
            old, new = self._current[loss.number], self._scheduler()
            self._current[loss.number] = new
            world.fakes.append(new)
            if loss.kind == "killed":
                await old.close()
            else:
                old.leave()
            await world.open(new)
            world.backend.addresses = world.backend.addresses[-len(self._current) :]


@settings(max_examples=num_cases(300))
@given(case=cases())
def test_what_a_call_gets_is_what_it_would_have_got_undisturbed(
    tokenizer: Tokenizer, case: Case
) -> None:
    undisturbed = replace(case, num_schedulers=1, faults=(), losses=())
    expected = asyncio.run(Run(undisturbed, tokenizer).outcome())
    assert asyncio.run(Run(case, tokenizer).outcome()) == expected
