"""The journal of one scheduler: every event in a log, with a checksum of what it came to.

A plan is kept as the checksum of each of its fields and the end of the chain that the ranks check.
"""

from zlib import crc32

import msgspec

from cluster.request import Request
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.events import AddAll, Event, Schedule, TakeLoads, TakeUnloaded
from cluster.scheduler.replay.event_log import Begin, Continue, EventLog, config_values
from cluster.scheduler.replay.plan_checksum import PlanChecksum, checksum_plan
from worker.protocol import GENESIS, Plan

_encoder = msgspec.msgpack.Encoder()
_requests_decoder = msgspec.msgpack.Decoder(tuple[Request, ...])


class EventJournal:
    """Writes one scheduler's life; see `cluster.scheduler.events.Journal`."""

    def __init__(self, config: SchedulerConfig, log: EventLog, version: str) -> None:
        self._values = config_values(config)
        self._log = log
        self._version = version  # of topwork
        self._digest = GENESIS
        if log.is_full:
            log.rotate(continues=False)
        log.write(Begin(version, self._values))

    def received(self, event: Event) -> Event:
        """Return the event as a replay will read it, be it only 0.0 for 0."""
        if isinstance(event, AddAll):
            requests = _requests_decoder.decode(_encoder.encode(event.requests))
            return AddAll(requests, event.resumes)
        return event

    def applied(self, event: Event, result: object) -> None:
        """Write an event and what it came to; one that found nothing to take changed nothing."""
        if isinstance(event, TakeLoads | TakeUnloaded) and not result:
            return
        self._rotate_if_full()
        outcome, self._digest = outcome_of(event, result, self._digest)
        self._log.write(event, outcome=outcome)

    def raised(self, event: Event, error: Exception) -> None:
        """Write an event whose handler raised."""
        self._rotate_if_full()
        self._log.write(event, raised=type(error).__name__)

    def _rotate_if_full(self) -> None:
        if self._log.is_full:
            self._log.rotate(continues=True)
            self._log.write(Continue(self._version, self._values, self._digest))


def outcome_of(
    event: Event, result: object, digest: bytes
) -> tuple[PlanChecksum | int | None, bytes]:
    """Return (checksum of a result, end of the chain of plans behind it)."""
    if isinstance(event, Schedule):
        if result is None:
            return None, digest
        assert isinstance(result, Plan), f"{result} is no plan"
        return checksum_plan(result, digest)
    return (None if result is None else crc32(_encoder.encode(result))), digest
