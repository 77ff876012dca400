"""Makes the calls of a log again, on schedulers of its own, and compares what comes of them.

Owns the comparison: the first event that ends otherwise than the log says is the difference that it
reports. Needs no model, no ranks and no clock. Knows nothing of files.
"""

from dataclasses import dataclass

import msgspec

from cluster.scheduler.replay.event_log import LogError, read_config
from cluster.scheduler.replay.events import (
    Abort,
    AdapterFailed,
    AdapterReady,
    AddAll,
    Allow,
    Begin,
    Commit,
    Event,
    Expire,
    Pin,
    Record,
    Resume,
    Schedule,
    TakeLoads,
    TakeUnloaded,
    Unload,
    Unpin,
)
from cluster.scheduler.replay.plan_checksum import MARK_BYTES, PlanMark, first_difference, mark_plan
from cluster.scheduler.replay.scheduler_state import State
from cluster.scheduler.replay.snapshot import restore, snapshot
from cluster.scheduler.scheduler import Scheduler
from worker.protocol import GENESIS, Plan

_SHOWN = 400  # characters of a value that differs


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a replay and its log part."""

    number: int  # of the event
    call: str
    step: int  # the one that was being planned, or the last one planned
    field: str  # of the plan, or what else of the call
    expected: str
    found: str

    def __str__(self) -> str:
        return (
            f"event {self.number} ({self.call}), step {self.step}, {self.field}: "
            f"the log has {self.expected}, the replay {self.found}"
        )


@dataclass(slots=True)
class Counts:
    """What a replay has gone through."""

    events: int = 0
    steps: int = 0
    requests: int = 0  # that were not refused
    lives: int = 0


class Replay:
    """A replay of the records of one or more files, in order."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.difference: Difference | None = None  # the first; nothing is to be applied after it
        self.version: str | None = None  # of the topwork that recorded
        self._scheduler: Scheduler | None = None
        self._digest = GENESIS
        self._step = 0
        self._last_number = 0
        self._is_file_new = False

    @property
    def chain(self) -> str:
        """The end of the chain of plans, as a log holds it, in hex."""
        return self._digest[:MARK_BYTES].hex()

    def begin_file(self) -> None:
        """Learn that the records that follow are from another file."""
        self._is_file_new = True

    def apply(self, record: Record, offset: int) -> None:
        """Make the call of one record and compare.

        Raises:
            LogError: if the record, found at byte `offset`, cannot follow those before it.
        """
        assert self.difference is None, "a replay ends with its first difference"
        event, follows = record.event, record.number == self._last_number + 1
        if self._is_file_new and not isinstance(event, Begin | Resume):
            raise LogError(offset, "the log does not begin with a scheduler")
        if not self._is_file_new and (not follows or isinstance(event, Resume)):
            name = type(event).__name__
            raise LogError(offset, f"event {record.number} ({name}) after {self._last_number}")
        self._is_file_new = False
        self._last_number = record.number
        self.counts.events += 1
        if isinstance(event, Begin):
            self._begin(event, offset)
        elif isinstance(event, Resume):
            self._resume(event, follows, offset)
        else:
            self._call(record)

    def _begin(self, event: Begin, offset: int) -> None:
        try:
            self._scheduler = Scheduler(read_config(event.config))
        except (ValueError, msgspec.ValidationError) as error:
            raise LogError(offset, f"not a scheduler's configuration: {error}") from error
        self.version, self._digest, self._step = event.version, GENESIS, 0
        self.counts.lives += 1

    def _resume(self, event: Resume, follows: bool, offset: int) -> None:
        """Go on from a snapshot, which is what has been replayed so far if that came before it."""
        if self._scheduler is not None and follows:
            if event.digest != self._digest:
                self._differ(event, "chain", event.digest.hex(), self._digest.hex())
            found = snapshot(self._scheduler)
            for name in State.__struct_fields__:
                self._compare(event, name, getattr(event.state, name), getattr(found, name))
        else:
            self.counts.lives += 1
        try:
            self._scheduler = restore(read_config(event.config), event.state)
        except Exception as error:  # a state that nobody was ever in can break anything
            reason = f"not a scheduler's state: {type(error).__name__}: {error}"
            raise LogError(offset, reason[:_SHOWN]) from error
        self.version, self._digest, self._step = event.version, event.digest, event.state.step

    def _call(self, record: Record) -> None:
        assert self._scheduler is not None, "a file begins with a scheduler"
        raised, text = None, "none"
        try:
            self._make(self._scheduler, record)
        except Exception as error:  # the log says which one to expect; any other is a difference
            raised = type(error).__name__
            text = f"{raised}: {error}"
        if raised != record.raised:
            self._differ(record.event, "exception", record.raised or "none", text)

    def _make(self, scheduler: Scheduler, record: Record) -> None:
        match event := record.event:
            case Schedule(expected):
                plan = scheduler.schedule()
                if record.raised is None:
                    self._compare_plans(event, expected, plan)
            case Commit(output):
                scheduler.commit(output)
            case AddAll(requests):
                self.counts.requests += len(scheduler.add_all(requests))
            case Abort(seq_id):
                scheduler.abort(seq_id)
            case Expire(seq_id):
                scheduler.expire(seq_id)
            case TakeLoads(loads):
                self._compare(event, "loads", loads, tuple(scheduler.take_loads()))
            case TakeUnloaded(unloaded):
                self._compare(event, "unloaded", unloaded, tuple(scheduler.take_unloaded()))
            case AdapterReady(adapter):
                scheduler.adapter_ready(adapter)
            case AdapterFailed(adapter, error):
                scheduler.adapter_failed(adapter, error)
            case Pin(digest, num_bytes):
                scheduler.pin(digest, num_bytes)
            case Unpin(digest):
                scheduler.unpin(digest)
            case Unload(digest, force):
                scheduler.unload(digest, force=force)
            case Allow(digest):
                scheduler.allow(digest)
            case Begin() | Resume():
                raise AssertionError("not a call")

    def _compare_plans(self, event: Event, expected: PlanMark | None, plan: Plan | None) -> None:
        found = None
        if plan is not None:
            found, self._digest = mark_plan(plan, self._digest)
            self.counts.steps += 1
        self._step = next((mark.step for mark in (expected, found) if mark), self._step)
        difference = first_difference(expected, found)
        if difference is not None:
            value = getattr(plan, difference.field, None)
            text = difference.found if value is None else f"{difference.found}: {value}"
            self._differ(event, difference.field, difference.expected, text)

    def _compare(self, event: Event, field: str, expected: object, found: object) -> None:
        if expected != found:
            self._differ(event, field, str(expected), str(found))

    def _differ(self, event: Event, field: str, expected: str, found: str) -> None:
        if self.difference is None:
            self.difference = Difference(
                number=self._last_number,
                call=type(event).__name__,
                step=self._step,
                field=field,
                expected=expected[:_SHOWN],
                found=found[:_SHOWN],
            )
