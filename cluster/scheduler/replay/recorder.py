"""A scheduler that writes down every call that changes it.

Has the face of `Scheduler` and gives the same answers; in place of it when a recording is wanted.
The log says of each call what went in and, of each plan, a mark; `replay` makes the same calls
again. Owns the end of the chain of plans. Knows nothing of files.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from cluster.request import ErrorInfo, Request, TokenEvent
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.events import CacheObserver
from cluster.scheduler.replay.event_log import EventLog, config_values
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
    Resume,
    Schedule,
    TakeLoads,
    TakeUnloaded,
    Unload,
    Unpin,
)
from cluster.scheduler.replay.plan_checksum import mark_plan
from cluster.scheduler.replay.snapshot import snapshot
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.stats import AdapterLoad, SchedulerStats, UnloadedAdapter
from worker.protocol import GENESIS, Plan, StepOutput


class RecordedScheduler:
    """A new scheduler, and with it a new life in the log."""

    def __init__(
        self,
        config: SchedulerConfig,
        log: EventLog,
        version: str,
        observer: CacheObserver | None = None,
    ) -> None:
        self._scheduler = Scheduler(config, observer)
        self._config = config
        self._log = log
        self._version = version  # of topwork
        self._digest = GENESIS
        if log.is_full:
            log.turn()
        log.write(Begin(version, config_values(config)))

    def add(self, request: Request) -> int:
        """As `Scheduler.add`."""
        return self.add_all((request,))[0]

    def add_all(self, requests: tuple[Request, ...]) -> list[int]:
        """As `Scheduler.add_all`."""
        # The scheduler gets what the log will give to a replay, be it only 0.0 for 0.
        requests = _requests_decoder.decode(_encoder.encode(requests))
        with self._written(AddAll(requests)):
            return self._scheduler.add_all(requests)

    def abort(self, seq_id: int) -> None:
        """As `Scheduler.abort`."""
        with self._written(Abort(seq_id)):
            self._scheduler.abort(seq_id)

    def expire(self, seq_id: int) -> list[tuple[int, TokenEvent]]:
        """As `Scheduler.expire`."""
        with self._written(Expire(seq_id)):
            return self._scheduler.expire(seq_id)

    def adapter_ready(self, adapter: str) -> None:
        """As `Scheduler.adapter_ready`."""
        with self._written(AdapterReady(adapter)):
            self._scheduler.adapter_ready(adapter)

    def adapter_failed(self, adapter: str, error: ErrorInfo) -> list[tuple[int, TokenEvent]]:
        """As `Scheduler.adapter_failed`."""
        with self._written(AdapterFailed(adapter, error)):
            return self._scheduler.adapter_failed(adapter, error)

    def upcoming(self) -> tuple[str, ...]:
        """As `Scheduler.upcoming`."""
        return self._scheduler.upcoming()

    def pin(self, digest: str, num_bytes: int = 0) -> None:
        """As `Scheduler.pin`."""
        with self._written(Pin(digest, num_bytes)):
            self._scheduler.pin(digest, num_bytes)

    def unpin(self, digest: str) -> None:
        """As `Scheduler.unpin`."""
        with self._written(Unpin(digest)):
            self._scheduler.unpin(digest)

    def unload(self, digest: str, *, force: bool = False) -> list[tuple[int, TokenEvent]]:
        """As `Scheduler.unload`."""
        with self._written(Unload(digest, force)):
            return self._scheduler.unload(digest, force=force)

    def allow(self, digest: str) -> None:
        """As `Scheduler.allow`."""
        with self._written(Allow(digest)):
            self._scheduler.allow(digest)

    def take_unloaded(self) -> list[UnloadedAdapter]:
        """As `Scheduler.take_unloaded`."""
        unloaded = self._scheduler.take_unloaded()
        if unloaded:
            self._log.write(TakeUnloaded(tuple(unloaded)))
        return unloaded

    def take_loads(self) -> list[AdapterLoad]:
        """As `Scheduler.take_loads`."""
        loads = self._scheduler.take_loads()
        if loads:
            self._log.write(TakeLoads(tuple(loads)))
        return loads

    def schedule(self) -> Plan | None:
        """As `Scheduler.schedule`; where the file is full, the next one begins here."""
        if self._log.is_full:
            self._turn()
        try:
            plan = self._scheduler.schedule()
        except Exception as error:
            self._log.write(Schedule(None), type(error).__name__)
            raise
        mark = None
        if plan is not None:
            mark, self._digest = mark_plan(plan, self._digest)
        self._log.write(Schedule(mark))
        return plan

    def commit(self, output: StepOutput) -> list[tuple[int, TokenEvent]]:
        """As `Scheduler.commit`."""
        with self._written(Commit(output)):
            return self._scheduler.commit(output)

    def contents(self, observer: CacheObserver) -> None:
        """As `Scheduler.contents`."""
        self._scheduler.contents(observer)

    def stats(self) -> SchedulerStats:
        """As `Scheduler.stats`."""
        return self._scheduler.stats()

    def check(self) -> None:
        """As `Scheduler.check`."""
        self._scheduler.check()

    @contextmanager
    def _written(self, event: Event) -> Iterator[None]:
        """Write an event when its call has ended, however it ended."""
        try:
            yield
        except Exception as error:
            self._log.write(event, type(error).__name__)
            raise
        self._log.write(event)

    def _turn(self) -> None:
        state = snapshot(self._scheduler)
        self._log.turn()
        self._log.write(Resume(self._version, config_values(self._config), self._digest, state))


_encoder = msgspec.msgpack.Encoder()
_requests_decoder = msgspec.msgpack.Decoder(tuple[Request, ...])

AnyScheduler = Scheduler | RecordedScheduler
