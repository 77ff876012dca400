"""Calls over fake schedulers: a router's part that generates, without HTTP around it."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from cluster.messages import SchedulerAddress
from cluster.request import BASE, Request
from cluster.router.config import RouterConfig
from cluster.router.generation import Generation
from cluster.router.metrics.request_metrics import RouterMetrics
from cluster.router.output_processor import (
    CompletionOutput,
    OutputProcessor,
    TextOptions,
    TokenLogprob,
)
from cluster.router.replica_set import ReplicaSet
from cluster.router.testing.fake_backend import FakeBackend
from cluster.router.testing.fake_scheduler import FakeScheduler
from cluster.router.tokenizer import Tokenizer
from tests.patience import PATIENCE
from worker.protocol import SamplingParams

CONFIG = RouterConfig(
    model_name="m", model_dir="", context_length=256, vocab_size=320, eos_token_ids=(2,),
    refresh_interval=0.01, retry_after=0, recovery_timeout=PATIENCE,
)  # fmt: skip
PLAIN = TextOptions(stops=(), include_stop=False, skip_special_tokens=True, min_tokens=0)


def choice(
    request_id: str = "r",
    prompt: tuple[int, ...] = (5, 6, 7),
    *,
    seed: int = 0,
    max_tokens: int = 8,
    stop_token_ids: tuple[int, ...] = (),
    num_logprobs: int | None = None,
) -> Request:
    sampling = SamplingParams(seed=seed, num_logprobs=num_logprobs)
    return Request(request_id, BASE, prompt, sampling, max_tokens, stop_token_ids)


@dataclass
class Answer:
    """All deltas of one choice together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ends: list[tuple[str, str | int | None]] = field(default_factory=list)

    def add(self, delta: CompletionOutput) -> None:
        assert not self.ends, "a delta after the end"
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.ends.append((delta.finish_reason, delta.stop_reason))


class World:
    """A context: fake schedulers that listen, and a router's connections to them."""

    def __init__(
        self, tokenizer: Tokenizer, *fakes: FakeScheduler, config: RouterConfig = CONFIG
    ) -> None:
        self.fakes = list(fakes)
        self.backend = FakeBackend()
        self.config = config
        self.replicas = ReplicaSet(self.backend, config)
        self.metrics = RouterMetrics("m", 10)
        self._tokenizer = tokenizer

    async def __aenter__(self) -> "World":
        for fake in self.fakes:
            await self.open(fake)
        await self.replicas.refresh()
        self._running = asyncio.create_task(self.replicas.run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.replicas.close()
        for fake in self.fakes:
            await fake.close()

    async def open(self, fake: FakeScheduler) -> SchedulerAddress:
        """Start a scheduler and let the pool tell of it."""
        address = await fake.start()
        self.backend.addresses = (*self.backend.addresses, address)
        return address

    async def restart(self, fake: FakeScheduler) -> None:
        """Kill a scheduler and start it anew, elsewhere."""
        await fake.close()
        self.backend.addresses = ()
        await self.open(fake)

    def generation(self, *prompts: tuple[Request, ...], options: TextOptions = PLAIN) -> Generation:
        processors = [
            tuple(OutputProcessor(self._tokenizer, request, options) for request in choices)
            for choices in prompts
        ]
        numbers = [len(choices) for choices in prompts]
        metrics = self.metrics.call(("m",), numbers, time.monotonic())
        return Generation(
            processors, self.replicas, self.config, metrics, lambda count: lambda: None
        )

    async def answers(
        self, *prompts: tuple[Request, ...], options: TextOptions = PLAIN
    ) -> list[Answer]:
        with self.generation(*prompts, options=options) as generation:
            return await finish(generation)

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the series of a counter that are not zero."""
        series = self.metrics.counts("r").counters[name]
        return {labels: count for labels, count in series if count}


async def finish(generation: Generation, begun: Sequence[Answer] = ()) -> list[Answer]:
    """Receive until all has ended; return the answers, those `begun` with what they had."""
    answers = list(begun) or [Answer() for _ in generation.processors]
    async with asyncio.timeout(PATIENCE):
        while generation.is_running:
            for index, delta in await generation.receive():
                answers[index].add(delta)
    return answers


async def begin(generation: Generation, num_tokens: int) -> list[Answer]:
    """Receive until each answer has so many tokens; return them so far."""
    answers = [Answer() for _ in generation.processors]
    async with asyncio.timeout(PATIENCE):
        while any(one.num_tokens < num_tokens for one in generation.processors):
            for index, delta in await generation.receive():
                answers[index].add(delta)
    return answers


async def undisturbed(tokenizer: Tokenizer, *prompts: tuple[Request, ...]) -> list[Answer]:
    """Return the answers of a call whose scheduler is never lost."""
    async with World(tokenizer, FakeScheduler()) as world:
        return await world.answers(*prompts)
