"""What an engine tells routers of a request's times, if they ask."""

import asyncio
from typing import Any

from msgspec.structs import replace

from cluster.engine.executor import FailureCause
from cluster.engine.metrics import EngineMetrics, RequestTrace, SequenceTimes
from cluster.messages import Events, RequestTimes, Submit
from tests.cluster.engine.small_engine import RouterEnd, ask, ask_choices, until_ready, world_with
from tests.cluster.engine.test_metrics import Clock, plan
from tests.patience import PATIENCE


def traced(metrics: EngineMetrics, seq_id: int, adapter: str = "base") -> SequenceTimes:
    times = metrics.arrival(RequestTrace(adapter))
    metrics.queued(seq_id, times)
    return times


def test_a_request_waits_is_computed_and_goes_on_in_steps_that_took_so_long() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock)
    metrics.answered(100.0)  # a step of others
    times = traced(metrics, 1)
    assert metrics.request_times("r", times, is_end=True) is None  # it has not begun
    clock.now += 3
    metrics.planned(plan(1, {1: None}, [1], []))
    metrics.sent(1, is_ahead=False)
    for seconds in (0.25, 0.5):
        clock.now += seconds
        metrics.answered(seconds)
    assert metrics.delivered(times, has_token=True, is_end=False)
    assert metrics.request_times("r", times, is_end=False) == RequestTimes(
        "r", 3.0, first_token=3.75, num_prefill_steps=2, prefill_rank_seconds=0.75
    )
    clock.now += 1
    metrics.answered(1.0)
    assert not metrics.delivered(times, has_token=True, is_end=False)
    metrics.planned(plan(2, {1: None}, [1], [1]))  # it was preempted, and is back
    assert metrics.delivered(times, has_token=True, is_end=True)
    assert metrics.request_times("r", times, is_end=True) == RequestTimes(
        "r",
        3.0,
        first_token=3.75,
        end=4.75,
        num_prefill_steps=2,
        prefill_rank_seconds=0.75,
        num_decode_steps=1,
        decode_rank_seconds=1.0,
        num_preemptions=1,
    )


def test_the_step_behind_which_a_request_was_planned_is_none_of_its_own() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock)
    metrics.sent(1, is_ahead=False)  # a step of others
    times = traced(metrics, 1)
    clock.now += 3
    metrics.planned(plan(1, {1: None}, [1], []))
    metrics.sent(1, is_ahead=True)
    clock.now += 1
    metrics.answered(4.0)
    clock.now += 2
    metrics.answered(2.0)
    metrics.delivered(times, has_token=True, is_end=True)
    assert metrics.request_times("r", times, is_end=True) == RequestTimes(
        "r",
        3.0,
        first_token=6.0,
        end=6.0,
        num_prefill_steps=1,
        prefill_rank_seconds=2.0,
    )


def test_a_load_counts_as_far_as_the_request_waited_for_it() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock)
    began = metrics.load_begins(0, "a", ())
    clock.now += 2
    late, early = traced(metrics, 1, "a"), traced(metrics, 2, "b")
    clock.now += 3
    metrics.load_ends("a", began)
    after = traced(metrics, 3, "a")
    metrics.planned(plan(1, {1: 0, 2: None, 3: 0}, [1, 2, 3], []))
    told = metrics.request_times("r", late, is_end=False)
    assert told is not None
    assert (told.load_start, told.load_end, told.start) == (0.0, 3.0, 3.0)
    for other in (early, after):
        told = metrics.request_times("r", other, is_end=False)
        assert told is not None
        assert told.load_end is None


def test_what_is_known_of_a_load_goes_with_the_adapter() -> None:
    metrics = EngineMetrics(Clock())
    for number in range(100):
        metrics.load_ends(f"a{number}", metrics.load_begins(0, f"a{number}", ()))
    assert len(metrics._loads) == 1
    metrics.unloaded([(0, "a99")])
    assert not metrics._loads


def test_ranks_that_are_lost_are_counted_and_time_goes_on() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock)
    times = traced(metrics, 1)
    metrics.planned(plan(1, {1: None}, [1], []))
    metrics.delivered(times, has_token=True, is_end=False)
    metrics.parked(times)
    metrics.ranks_lost(FailureCause.RANK_GONE)
    clock.now += 7
    metrics.queued(1, times)
    metrics.planned(plan(1, {1: None}, [1], []))
    metrics.delivered(times, has_token=True, is_end=True)
    told = metrics.request_times("r", times, is_end=True)
    assert told is not None
    assert (told.num_recoveries, told.num_preemptions, told.end) == (1, 0, 7.0)


async def frames_until_end(router: RouterEnd, *request_ids: str) -> list[Any]:
    """Return all messages up to the end of the last one of the requests."""
    frames: list[Any] = []
    left = set(request_ids)
    async with asyncio.timeout(PATIENCE):
        while left:
            frames.append(await router.receive())
            if isinstance(frames[-1], Events):
                left -= {event.request_id for event in frames[-1].events if event.finish_reason}
    return frames


def told(submit: Submit) -> Submit:
    return replace(submit, wants_times=True)


async def test_times_come_before_the_first_token_and_before_the_end_to_who_asks() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(told(ask("timed", "cafe")))
        frames = await frames_until_end(router, "timed")
        router.send(ask("untimed", "cafe"))
        others = await frames_until_end(router, "untimed")
    assert not any(isinstance(frame, RequestTimes) for frame in others)
    first, last = (frame for frame in frames if isinstance(frame, RequestTimes))
    events = [frame for frame in frames if isinstance(frame, Events)]
    assert frames.index(first) < frames.index(events[0])
    assert frames.index(last) == frames.index(events[-1]) - 1
    assert first.end is None
    assert None not in (first.first_token, last.end, last.load_start, last.load_end)
    assert 0 <= last.load_start <= last.load_end <= last.start  # type: ignore[operator]
    assert last.start <= last.first_token <= last.end  # type: ignore[operator]
    assert (last.num_prefill_steps, last.num_decode_steps) == (1, 5)
    assert last.prefill_rank_seconds > 0 < last.decode_rank_seconds


async def test_times_come_of_every_choice_and_under_the_names_that_the_router_knows() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        router.send(told(ask_choices("a", "b")))
        frames = await frames_until_end(router, "a", "b")
    ended = [one.request_id for one in frames if isinstance(one, RequestTimes) and one.end]
    assert sorted(ended) == ["a", "b"]


async def test_times_go_on_over_lost_ranks() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.handles[1].rank.fails = True
        router.send(told(ask("a")))
        frames = await frames_until_end(router, "a")
    last = [frame for frame in frames if isinstance(frame, RequestTimes)][-1]
    assert last.num_recoveries == 1
    assert last.end is not None
