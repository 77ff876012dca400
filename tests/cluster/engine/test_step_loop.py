"""The steps of the ranks: they have the next plan before they have ended the last."""

import asyncio
import time
from math import inf
from typing import Any, cast

import pytest

from cluster.engine.core import StepLoop, StepPace
from cluster.engine.dispatcher import Dispatcher
from cluster.engine.executor import Executor, ExecutorFailed, FailureCause
from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.lora_loader import LoraLoader
from cluster.engine.status import EngineStatus
from cluster.request import BASE, Request, TokenEvent
from cluster.scheduler.scheduler import Scheduler
from tests.cluster.scheduler.conftest import tiny_config
from worker.pools import PageCounts
from worker.protocol import SamplingParams, StepOutput
from worker.testing.fake_rank import FakeRank, fake_continuation

PROMPT = (1, 2, 3)


class LateRanks:
    """A rank that begins with a plan when its answer is waited for; `is_quick`: at once."""

    def __init__(self, *, is_quick: bool = False) -> None:
        self.log: list[str] = []
        self._rank = FakeRank(page_size=4)
        self._rank.allocate(PageCounts(64))
        self._frames: list[bytes] = []
        self._is_quick = is_quick

    def send(self, frame: bytes, num_rows: int) -> None:
        self._frames.append(frame)
        self.log.append("sent")

    async def has_answered(self, step: int, within: float) -> bool:
        await asyncio.sleep(0)
        return self._is_quick

    async def output(self, step: int) -> StepOutput:
        self.log.append("answered")
        output = self._rank.step(self._frames.pop(0)).output
        assert output is not None and output.step == step
        return output


class FakeDispatcher:
    """A dispatcher that keeps the tokens that it is to deliver."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def deliver(self, events: list[tuple[int, TokenEvent]]) -> None:
        for _, event in events:
            self.token_ids += event.token_ids


class IdleLoader:
    """A loader without work."""

    def run_pending(self, *arguments: object, **words: object) -> None:
        return


async def run_until_idle(
    ranks: LateRanks,
    scheduler: Scheduler,
    ahead_rows: float = inf,
    status: EngineStatus | None = None,
) -> list[int]:
    """Step until nothing is left, and return the tokens that were delivered."""
    dispatcher = FakeDispatcher()

    async def idle() -> None:
        raise ExecutorFailed("nothing is left to do", FailureCause.RANK_GONE)

    loop = StepLoop(
        cast(Executor, ranks),
        scheduler,
        cast(LoraLoader, IdleLoader()),
        cast(Dispatcher, dispatcher),
        KvEventFeed("model", time.time, None),
        status or EngineStatus("0", time.monotonic),
        ahead_rows,
    )
    with pytest.raises(ExecutorFailed, match="nothing is left"):
        await loop.run(idle)
    return dispatcher.token_ids


def scheduler_with_one(max_tokens: int, **words: Any) -> Scheduler:
    scheduler = Scheduler(tiny_config(num_slots=0))
    scheduler.add(Request("r", BASE, PROMPT, SamplingParams(), max_tokens, **words))
    return scheduler


async def test_the_next_plan_is_sent_before_the_last_is_answered() -> None:
    ranks = LateRanks()
    tokens = await run_until_idle(ranks, scheduler_with_one(4))
    assert tuple(tokens) == fake_continuation(None, PROMPT, 4)
    assert ranks.log == ["sent", *["sent", "answered"] * 3, "answered"]


@pytest.mark.parametrize(("is_quick", "num_ahead"), [(False, 3), (True, 0)])
async def test_steps_whose_plan_was_sent_ahead_are_counted(is_quick: bool, num_ahead: int) -> None:
    status = EngineStatus("0", time.monotonic)
    ranks = LateRanks(is_quick=is_quick)
    await run_until_idle(ranks, scheduler_with_one(4), status=status)
    snapshot = status.snapshot(1, None, None, {})
    assert snapshot.engine.steps_ahead == num_ahead


async def test_ranks_that_answer_sooner_get_the_next_plan_with_all_that_is_known() -> None:
    ranks = LateRanks(is_quick=True)
    tokens = await run_until_idle(ranks, scheduler_with_one(4))
    assert tuple(tokens) == fake_continuation(None, PROMPT, 4)
    assert ranks.log == ["sent", "answered"] * 4


async def test_while_a_step_of_many_rows_runs_none_is_planned() -> None:
    ranks = LateRanks()
    await run_until_idle(ranks, scheduler_with_one(4), ahead_rows=2)
    assert ranks.log == ["sent", "answered", "sent", *["sent", "answered"] * 2, "answered"]


async def test_a_stop_that_comes_with_a_step_under_way_is_delivered_at_once_and_once() -> None:
    stop = fake_continuation(None, PROMPT, 2)[1]
    ranks = LateRanks()
    tokens = await run_until_idle(ranks, scheduler_with_one(9, stop_token_ids=(stop,)))
    assert tuple(tokens) == fake_continuation(None, PROMPT, 2)
    assert ranks.log.count("sent") == ranks.log.count("answered")


def test_the_next_step_is_planned_late_in_the_shortest_of_the_last() -> None:
    now = 100.0
    pace = StepPace(lambda: now)
    assert pace.rest == 0.0  # nothing is known yet
    for duration in (10.0, 2.0, 4.0):
        pace.begins()
        now += duration
        pace.ends()
    pace.begins()
    now += 0.5
    assert pace.rest == pytest.approx(0.6 * 2.0 - 0.5)
