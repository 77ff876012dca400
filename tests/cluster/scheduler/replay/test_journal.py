"""A journal has every event that changes a scheduler, and what came of it; and changes nothing."""

from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import msgspec
import pytest

from cluster.engine.recording import EventFile
from cluster.errors import Conflict, ErrorInfo
from cluster.request import BASE, Request
from cluster.scheduler.events import (
    Abort,
    AdapterFailed,
    AdapterReady,
    AddAll,
    Allow,
    AnyEvent,
    Commit,
    Event,
    Expire,
    Pin,
    ResetPrefixCache,
    Schedule,
    TakeLoads,
    TakeUnloaded,
    Unload,
    Unpin,
)
from cluster.scheduler.replay.event_log import Begin
from cluster.scheduler.replay.journal import EventJournal
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from tests.cluster.scheduler.random_life import read_records
from worker.protocol import SamplingParams, StepOutput


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(path: Path) -> Iterator[EventFile]:
    log = EventFile(path, 2**20)
    yield log
    log.close()


def recorded(log: EventFile, **changes: int) -> Scheduler:
    config = tiny_config(**changes)
    return Scheduler(config, journal=EventJournal(config, log, "test"))


def test_every_call_that_changes_something_is_one_event(path: Path, log: EventFile) -> None:
    scheduler = recorded(log)
    error = ErrorInfo("NotFound", "gone")
    request = Request("r", "A", (1, 2, 3), SamplingParams(), 2)
    scheduler.add(request)
    scheduler.schedule()
    (load,) = scheduler.take_loads()
    scheduler.adapter_ready("A")
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(StepOutput(1, (), failed=(1,)))
    scheduler.add(Request("s", "B", (1,), SamplingParams(), 2))
    assert len(scheduler.take_loads()) == 1
    scheduler.adapter_failed("B", error)
    scheduler.pin("A", 0)
    scheduler.unpin("A")
    scheduler.unload("A")
    scheduler.allow("A")
    scheduler.reset_prefix_cache()
    scheduler.abort(1)
    scheduler.expire(1)
    assert len(scheduler.take_unloaded()) == 1
    scheduler.take_loads()
    scheduler.take_unloaded()
    scheduler.stats()
    scheduler.check()
    log.close()
    records = read_records(path)
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    events = [record.event for record in records]
    assert [type(event) for event in events] == [
        Begin,
        AddAll,
        Schedule,
        TakeLoads,
        AdapterReady,
        Schedule,
        Commit,
        AddAll,
        TakeLoads,
        AdapterFailed,
        Pin,
        Unpin,
        Unload,
        Allow,
        ResetPrefixCache,
        Abort,
        Expire,
        TakeUnloaded,
    ]
    assert events[1:4] == [AddAll((request,)), Schedule(), TakeLoads()]
    assert events[9] == AdapterFailed("B", error)
    assert [record.outcome for record in records[1:4]] == [
        crc32(msgspec.msgpack.encode([1])),
        None,
        crc32(msgspec.msgpack.encode([load])),
    ]
    assert {type(event) for event in events[1:]} == set(AnyEvent.__args__)


def test_every_event_is_of_one_method_of_a_scheduler() -> None:
    kinds = {kind.__name__.lower() for kind in Event.__subclasses__()}
    assert {kind.__name__.lower() for kind in AnyEvent.__args__} == kinds
    methods = {name.replace("_", "") for name in vars(Scheduler)}
    assert kinds <= methods


def test_a_scheduler_is_told_the_same_by_its_methods_and_by_events() -> None:
    by_method, by_event = Scheduler(tiny_config()), Scheduler(tiny_config())
    request = Request("r", BASE, (1, 2, 3), SamplingParams(), 2)
    assert by_method.add_all((request,)) == by_event.apply(AddAll((request,))) == [1]
    assert by_method.schedule() == by_event.apply(Schedule())
    assert by_method.unload("A", force=True) == by_event.apply(Unload("A", True)) == []
    by_method.abort(1)
    by_event.apply(Abort(1))
    assert by_method.stats() == by_event.stats()


def test_a_call_that_raises_is_an_event_with_the_class_of_the_exception(
    path: Path, log: EventFile
) -> None:
    scheduler = recorded(log, num_slots=1)
    with pytest.raises(Conflict):
        scheduler.unload(BASE)
    with pytest.raises(KeyError):
        scheduler.adapter_ready("unknown")
    with pytest.raises(AssertionError):
        scheduler.commit(StepOutput(1, ()))
    # No flush and no close: a failed call is on disk at once.
    raised = [(type(r.event).__name__, r.raised) for r in read_records(path)[1:]]
    assert raised == [
        ("Unload", "Conflict"),
        ("AdapterReady", "KeyError"),
        ("Commit", "AssertionError"),
    ]


def test_the_scheduler_gets_the_request_that_the_log_will_give(log: EventFile) -> None:
    scheduler = recorded(log)
    scheduler.add(Request("r", BASE, (1, 2), SamplingParams(temperature=0), 2))
    plan = scheduler.schedule()
    assert plan is not None
    assert type(plan.starts[0].sampling.temperature) is float


def test_plans_and_answers_are_those_of_a_scheduler(log: EventFile) -> None:
    engines = [FakeEngine(tiny_config()), FakeEngine(tiny_config())]
    engines[1].scheduler = recorded(log)
    for engine in engines:
        for number in range(20):
            engine.add(tuple(range(1 + number % 7)), 1 + number % 5, [BASE, "A", "B"][number % 3])
        engine.run()
    assert engines[0].plans == engines[1].plans
    assert engines[0].events == engines[1].events
    assert engines[0].scheduler.stats() == engines[1].scheduler.stats()
