"""What an engine measures of sequences, steps and slots, and why it lost its ranks."""

import asyncio

import pytest

from cluster.engine.executor import FailureCause
from cluster.engine.metrics import EngineMetrics, SequenceTimes
from cluster.messages import Status
from tests.cluster.engine.small_engine import RouterEnd, ask, until_ready, world_with
from tests.patience import PATIENCE
from worker.protocol import Chunk, Plan, SamplingParams, SequenceStart, StepOutput


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> EngineMetrics:
    return EngineMetrics(clock)


def plan(step: int, starts: dict[int, int | None], runs: list[int], ends: list[int]) -> Plan:
    """Return a plan that starts sequences in slots, and runs and ends others."""
    return Plan(
        step=step,
        ends=tuple(ends),
        starts=tuple(
            SequenceStart(seq_id, slot, SamplingParams(), 4, (), 0, ())
            for seq_id, slot in starts.items()
        ),
        chunks=tuple(Chunk(seq_id, 0, (1,), (), True) for seq_id in runs),
    )


def arrived(metrics: EngineMetrics, *seq_ids: int) -> list[SequenceTimes]:
    """Let requests come and be queued."""
    all_times = [metrics.arrival() for _ in seq_ids]
    for seq_id, times in zip(seq_ids, all_times, strict=True):
        metrics.queued(seq_id, times)
    return all_times


def counted(metrics: EngineMetrics, name: str) -> tuple[int, float]:
    counts = metrics.histograms()[name]
    return counts.number, counts.total


def test_a_sequence_waits_is_computed_and_goes_on(metrics: EngineMetrics, clock: Clock) -> None:
    first, _ = arrived(metrics, 1, 2)
    clock.now += 3
    metrics.planned(plan(1, {1: None}, [1], []))
    assert counted(metrics, "queue_time_seconds") == (1, 3.0)
    assert metrics.oldest_wait() == 3.0  # the other one's
    clock.now += 0.5
    metrics.delivered(first, has_token=True, is_end=False)
    clock.now += 2
    metrics.delivered(first, has_token=True, is_end=True)
    metrics.removed(1)
    assert counted(metrics, "prefill_time_seconds") == (1, 0.5)
    assert counted(metrics, "decode_time_seconds") == (1, 2.0)
    assert counted(metrics, "inference_time_seconds") == (1, 2.5)
    assert counted(metrics, "request_num_preemptions") == (1, 0.0)
    metrics.removed(2)  # aborted while it waited
    assert metrics.oldest_wait() == 0.0
    assert counted(metrics, "queue_time_seconds") == (1, 3.0)


def test_a_sequence_that_was_preempted_has_waited_once(
    metrics: EngineMetrics, clock: Clock
) -> None:
    (times,) = arrived(metrics, 1)
    metrics.planned(plan(1, {1: None}, [1], []))
    metrics.delivered(times, has_token=True, is_end=False)
    clock.now += 9
    metrics.planned(plan(2, {1: None}, [1], [1]))
    assert counted(metrics, "queue_time_seconds") == (1, 0.0)
    assert metrics.oldest_wait() == 0.0
    metrics.delivered(times, has_token=True, is_end=True)
    assert counted(metrics, "request_num_preemptions") == (1, 1.0)


def test_what_goes_on_behind_lost_ranks_was_not_preempted(metrics: EngineMetrics) -> None:
    (times,) = arrived(metrics, 1)
    metrics.planned(plan(1, {1: None}, [1], []))
    metrics.delivered(times, has_token=True, is_end=False)
    metrics.parked(times)
    metrics.ranks_lost(FailureCause.RANK_GONE)
    metrics.queued(2, times)
    metrics.planned(plan(1, {2: None}, [2], []))
    metrics.delivered(times, has_token=True, is_end=True)
    assert counted(metrics, "request_num_preemptions") == (1, 0.0)


def test_a_step_is_measured_in_parts_with_its_sequences_and_adapters(
    metrics: EngineMetrics, clock: Clock
) -> None:
    arrived(metrics, 1, 2, 3)
    metrics.step_begins()
    clock.now += 2
    metrics.planned(plan(1, {1: 0, 2: 0, 3: None}, [1, 2, 3], []))
    metrics.answered(5.0)
    clock.now += 3
    metrics.committed(StepOutput(1, (), num_masks=3, num_late_masks=1))
    for name, seconds in (("plan", 2.0), ("ranks", 5.0), ("commit", 3.0)):
        assert counted(metrics, f"step_seconds/{name}") == (1, seconds)
    assert counted(metrics, "batch_size") == (1, 3.0)
    assert counted(metrics, "adapters_per_batch") == (1, 1.0)
    arrived(metrics, 4)
    metrics.planned(plan(2, {4: 1}, [2, 4], [1, 3]))
    assert counted(metrics, "adapters_per_batch") == (2, 3.0)
    metrics.sent(7, is_ahead=False)
    metrics.sent(2, is_ahead=True)
    assert counted(metrics, "iteration_tokens") == (2, 9.0)
    assert metrics.counters.steps_ahead == 1


def test_an_eviction_is_counted_once_whoever_clears_the_slot(
    metrics: EngineMetrics, clock: Clock
) -> None:
    began = metrics.load_begins(0, "a", ())
    clock.now += 0.25
    metrics.load_ends("a", began)
    assert counted(metrics, "adapter_load_seconds") == (1, 0.25)
    assert metrics.counters.adapter_evictions == 0
    metrics.load_begins(0, "b", ())  # into a's slot
    assert metrics.counters.adapter_evictions == 1
    metrics.load_begins(1, "c", ((0, "b"), (1, "x")))  # b gives its memory; 1 was free by then
    assert metrics.counters.adapter_evictions == 2
    metrics.load_begins(0, "d", ())
    assert metrics.counters.adapter_evictions == 2


def test_unloaded_and_failed_adapters_are_not_evicted(metrics: EngineMetrics) -> None:
    metrics.load_begins(0, "a", ())
    metrics.unloaded([(0, "a")])
    metrics.load_begins(0, "b", ())
    metrics.load_fails(0)
    metrics.load_begins(0, "c", ())
    assert (metrics.counters.adapter_evictions, metrics.counters.failed_adapter_loads) == (0, 1)


def test_lost_ranks_take_their_sequences_along(metrics: EngineMetrics, clock: Clock) -> None:
    arrived(metrics, 1)
    metrics.load_begins(0, "a", ())
    metrics.ranks_lost(FailureCause.RANK_GONE)
    clock.now += 5
    assert metrics.oldest_wait() == 0.0
    metrics.load_begins(0, "b", ())
    assert metrics.counters.adapter_evictions == 0
    assert {cause: count for cause, count in metrics.failures.items() if count} == {
        FailureCause.RANK_GONE: 1
    }


def test_a_stream_stands_still_from_the_last_answer_of_lost_ranks_to_its_next_token(
    metrics: EngineMetrics, clock: Clock
) -> None:
    running, waiting = arrived(metrics, 1, 2)
    metrics.planned(plan(1, {1: None}, [1], []))
    metrics.answered(0.0)
    metrics.delivered(running, has_token=True, is_end=False)
    clock.now += 2
    metrics.ranks_lost(FailureCause.STEP_TIMEOUT)
    for times in (running, waiting):
        metrics.parked(times)
    clock.now += 3
    metrics.ranks_lost(FailureCause.START)  # and again, before anything came
    metrics.parked(running)
    metrics.queued(1, running)
    metrics.queued(2, waiting)
    assert metrics.oldest_wait() == 5.0
    clock.now += 1
    metrics.delivered(running, has_token=True, is_end=False)
    metrics.delivered(running, has_token=True, is_end=False)
    assert counted(metrics, "stream_pause_seconds") == (1, 6.0)


async def until_ready_again(router: RouterEnd, restarts: int) -> Status:
    async with asyncio.timeout(PATIENCE):
        while (status := await router.status()).engine.restarts < restarts or not status.ready:
            await asyncio.sleep(0.01)
    return status


async def test_what_ranks_are_lost_for_is_counted_by_cause() -> None:
    async with world_with("deadly", step_timeout=1.0) as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.handles[1].rank.fails = True
        router.send(ask("a"))
        await router.collect("a")
        await until_ready(router)
        world.launcher.handles[0].rank.hangs.set()
        router.send(ask("b"))
        await router.collect("b")
        await until_ready(router)
        router.send(ask("c", "deadly"))
        await router.collect("c")
        await until_ready(router)
        world.launcher.handles[1].fails_to_clear = True
        router.send(ask("d", "gone"))  # its slot is cleared when it cannot be had
        await router.collect("d")
        status = await until_ready_again(router, 6)
    lost = {kind: count for kind, count in status.failures.items() if count}
    assert lost == {"rank_error": 1, "step_timeout": 1, "adapter_load": 3, "slot_clear": 1}
    assert status.engine.restarts == 6


async def test_an_engine_measures_what_it_serves() -> None:
    async with world_with("cafe", "beef", "feed") as world:
        router = await world.connect()
        await until_ready(router)
        for number, adapter in enumerate(("cafe", "beef", "feed", "gone")):
            router.send(ask(f"r{number}", adapter))
            await router.collect(f"r{number}")
        status = await router.status()
    numbers = {name: counted.number for name, counted in status.histograms.items()}
    assert numbers["queue_time_seconds"] == numbers["decode_time_seconds"] == 3
    assert numbers["adapter_load_seconds"] == 3
    assert numbers["step_seconds/plan"] == numbers["step_seconds/commit"] == status.scheduler.step
    assert status.engine.failed_adapter_loads == 1
    # Two slots: the third load evicts one, the one that fails another.
    assert (status.scheduler.counters.adapter_loads, status.engine.adapter_evictions) == (4, 2)
    assert status.oldest_wait == 0.0
