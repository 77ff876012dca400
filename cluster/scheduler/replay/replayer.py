"""Applies the events of a log again, to schedulers of its own, and compares what comes of them.

The first event that ends otherwise than the log says is the difference that it reports. Needs no
model, no ranks and no clock.
"""

from dataclasses import dataclass

import msgspec

from cluster.scheduler.events import AddAll, AnyEvent
from cluster.scheduler.replay.event_log import (
    Begin,
    Checkpoint,
    Continue,
    LogError,
    Record,
    read_config,
)
from cluster.scheduler.replay.journal import outcome_of
from cluster.scheduler.replay.plan_checksum import (
    CHAIN_BYTES,
    PlanChecksum,
    PlanDifference,
    first_difference,
)
from cluster.scheduler.replay.state import decode_state, encode_state
from cluster.scheduler.scheduler import Scheduler
from worker.protocol import GENESIS

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
    schedulers: int = 0


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
        self._checkpoint: Checkpoint | None = None

    @property
    def chain(self) -> str:
        """The end of the chain of plans, as a log holds it, in hex."""
        return self._digest[:CHAIN_BYTES].hex()

    def begin_file(self, checkpoint: Checkpoint | None = None) -> None:
        """Expect the first record of another file; `checkpoint` is what its FILE.state holds."""
        self._is_file_new = True
        self._checkpoint = checkpoint

    def checkpoint(self) -> Checkpoint | None:
        """Return the scheduler as it is now, if there is one."""
        if self._scheduler is None or self.version is None:
            return None
        state = encode_state(self._scheduler)
        return Checkpoint(self.version, self._last_number, self._step, self._digest, state)

    def apply(self, record: Record, offset: int) -> None:
        """Apply the event of one record and compare.

        Raises:
            LogError: if the record, found at byte `offset`, cannot follow those before it.
        """
        assert self.difference is None, "a replay ends with its first difference"
        event, follows = record.event, record.number == self._last_number + 1
        if self._is_file_new and not isinstance(event, Begin | Continue):
            raise LogError(offset, "the log does not begin with a scheduler")
        if not self._is_file_new and (not follows or isinstance(event, Continue)):
            name = type(event).__name__
            raise LogError(offset, f"event {record.number} ({name}) after {self._last_number}")
        self._is_file_new = False
        self._last_number = record.number
        self.counts.events += 1
        if isinstance(event, Begin):
            self._begin(event, offset)
        elif isinstance(event, Continue):
            self._continue(event, follows, offset)
        else:
            self._call(record, event)

    def _begin(self, event: Begin, offset: int) -> None:
        try:
            self._scheduler = Scheduler(read_config(event.config))
        except (ValueError, msgspec.ValidationError) as error:
            raise LogError(offset, f"not a scheduler's configuration: {error}") from error
        self.version, self._digest, self._step = event.version, GENESIS, 0
        self.counts.schedulers += 1

    def _continue(self, event: Continue, follows: bool, offset: int) -> None:
        """Go on with what has been replayed so far, or with the state that was kept of it."""
        if self._scheduler is not None and follows:
            if event.digest != self._digest:
                self._differ("Continue", "chain", event.digest.hex(), self._digest.hex())
            return
        found = self._checkpoint
        if found is None:
            raise LogError(
                offset,
                "the log goes on with the scheduler of the file before it: replay that first, or "
                "have its state in a file of the same name with .state behind it",
            )
        if (found.number, found.digest) != (self._last_number - 1, event.digest):
            raise LogError(offset, f"the state is the one behind event {found.number}")
        try:
            self._scheduler = decode_state(found.state)
            is_same = self._scheduler.config == read_config(event.config)
        except Exception as error:  # a state that nobody was ever in can break anything
            reason = f"not a scheduler's state: {type(error).__name__}: {error}"
            raise LogError(offset, reason[:_SHOWN]) from error
        if not is_same:
            raise LogError(offset, "the state has another configuration")
        self.version, self._digest, self._step = event.version, event.digest, found.step
        self.counts.schedulers += 1

    def _call(self, record: Record, event: AnyEvent) -> None:
        assert self._scheduler is not None, "a file begins with a scheduler"
        name, raised, text = type(event).__name__, None, "none"
        result: object = None
        try:
            result = self._scheduler.apply(event)
        except Exception as error:  # the log says which one to expect; any other is a difference
            raised = type(error).__name__
            text = f"{raised}: {error}"
        if raised != record.raised:
            self._differ(name, "exception", record.raised or "none", text)
        if raised is not None or self.difference is not None:
            return
        if isinstance(event, AddAll):
            self.counts.requests += len(event.requests)
        outcome, self._digest = outcome_of(event, result, self._digest)
        plans = [one for one in (record.outcome, outcome) if isinstance(one, PlanChecksum)]
        if plans:
            self._step = plans[0].step
            self.counts.steps += isinstance(outcome, PlanChecksum)
        found = _first_difference(record.outcome, outcome)
        if found is not None:
            value = getattr(result, found.field, result if found.field == "result" else None)
            shown = found.found if value is None else f"{found.found}: {value}"
            self._differ(name, found.field, found.expected, shown)

    def _differ(self, call: str, field: str, expected: str, found: str) -> None:
        if self.difference is None:
            self.difference = Difference(
                number=self._last_number,
                call=call,
                step=self._step,
                field=field,
                expected=expected[:_SHOWN],
                found=found[:_SHOWN],
            )


def _first_difference(
    expected: PlanChecksum | int | None, found: PlanChecksum | int | None
) -> PlanDifference | None:
    if isinstance(expected, int) or isinstance(found, int):
        if expected == found:
            return None
        return PlanDifference("result", _checksum(expected), _checksum(found))
    return first_difference(expected, found)


def _checksum(outcome: PlanChecksum | int | None) -> str:
    return f"checksum {outcome:08x}" if isinstance(outcome, int) else str(outcome or "nothing")
