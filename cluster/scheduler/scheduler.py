"""The decision maker: requests and step outputs in, plans and token events out.

A deterministic state machine: the same calls give the same plans byte for byte. Owns the order of
decisions and the life of each sequence; the other rooms (`rooms`) own what there is to decide with.
Knows neither clock nor transport. When a group of ranks fails, its scheduler is thrown away.

Call `schedule` after any other call, then `take_unloaded` and `take_loads`: what an unload has
freed may be what a load needs. It may be called once more while a step is in flight: the ranks then
go from one step to the next without waiting for anybody.
"""

from cluster.request import ErrorInfo, Request, TokenEvent
from cluster.scheduler import census
from cluster.scheduler.batch import MAX_IN_FLIGHT, Batch
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.events import CacheObserver
from cluster.scheduler.outcome import EXPIRED, UNLOADED, failure
from cluster.scheduler.rooms import Rooms
from cluster.scheduler.stats import AdapterLoad, SchedulerStats, UnloadedAdapter
from worker.protocol import Plan, StepOutput


class Scheduler:
    """Continuous batching over one base model and many adapters."""

    def __init__(self, config: SchedulerConfig, observer: CacheObserver | None = None) -> None:
        assert config.num_pages > 0, "the ranks have said how many pages fit"
        self._step = 0
        self._in_flight: list[Batch] = []  # steps that are not committed, the oldest first
        self._rooms = Rooms(config, observer)

    def add(self, request: Request) -> int:
        """Queue a request and return its arrival number: 1, 2, 3, ...; raises as `add_all` does."""
        return self.add_all((request,))[0]

    def add_all(self, requests: tuple[Request, ...]) -> list[int]:
        """Queue the choices of one prompt, all or none, and return their arrival numbers.

        The first computes the prompt; the others start on its pages when it has.

        Raises:
            InvalidRequest: if they could never be served, or are not choices of one prompt.
            NotFound: if their adapter is being unloaded.
            Overloaded: if more than `max_waiting` sequences would wait.
        """
        return self._rooms.lobby.add_all(requests, self._step)

    def abort(self, seq_id: int) -> None:
        """End a sequence without an event, at a commit if a step is in flight.

        A sequence that is unknown or has ended is ignored.
        """
        running = self._rooms.running.get(seq_id)
        if running is not None and self._in_flight:
            self._rooms.committer.end_at_commit(running)
        elif running is not None:
            self._rooms.committer.finish(running, self._step)
        elif seq_id in self._rooms.sequences:
            self._rooms.lobby.drop(seq_id, self._step)
        self._settle()

    def expire(self, seq_id: int) -> list[tuple[int, TokenEvent]]:
        """End a sequence whose deadline has passed and return the event that says so.

        This is how time enters. A sequence that is unknown, has ended or is about to is ignored.
        """
        return self._end(seq_id, EXPIRED)

    def adapter_ready(self, adapter: str) -> None:
        """Let plans use an adapter that every rank has loaded into the slot it was given."""
        self._rooms.turns.ready(adapter, self._step)
        self._settle()

    def adapter_failed(self, adapter: str, error: ErrorInfo) -> list[tuple[int, TokenEvent]]:
        """Give up a load; end the requests that wait for it, and only those, with `error`."""
        dropped = self._rooms.lobby.drop_adapter(adapter, self._step)
        events = [(sequence.seq_id, failure(sequence, error)) for sequence in dropped]
        self._rooms.turns.free(adapter, self._step)
        self._settle()
        return events

    def upcoming(self) -> tuple[str, ...]:
        """Return the adapters that will be loaded next, the first in front; changes nothing."""
        return self._rooms.line.upcoming

    def pin(self, digest: str, num_bytes: int = 0) -> None:
        """Keep an adapter in its slot, now or once it is there; it claims `num_bytes`.

        Raises:
            Conflict: if no slot would be left for all the others, or too little memory.
        """
        self._rooms.pins.pin(digest, num_bytes, self._step)

    def unpin(self, digest: str) -> None:
        """Let an adapter be evicted again when it is idle."""
        self._rooms.pins.unpin(digest)

    def unload(self, digest: str, *, force: bool = False) -> list[tuple[int, TokenEvent]]:
        """Refuse new requests for an adapter, let those it has end, then forget it wholly.

        Sums that it is a part of go with it. With `force` those it has end now, by the events that
        are returned. The adapter may be used again as soon as `take_unloaded` has named it, or
        after `allow`. Calling this again before that changes nothing, and is answered by the same
        entry.

        Raises:
            Conflict: for the base model.
        """
        self._rooms.unloads.fence(digest)
        events: list[tuple[int, TokenEvent]] = []
        if force:
            for adapter in self._rooms.unloads.users(digest):
                dropped = self._rooms.lobby.drop_adapter(adapter, self._step)
                events += [(sequence.seq_id, failure(sequence, UNLOADED)) for sequence in dropped]
                for running in self._rooms.running.of_adapter(adapter):
                    events += self._end(running.seq_id, UNLOADED)
        self._settle()
        return events

    def allow(self, digest: str) -> None:
        """Take an unload back that is not complete yet; `take_unloaded` says that nothing went."""
        self._rooms.unloads.unfence(digest)

    def take_unloaded(self) -> list[UnloadedAdapter]:
        """Return the unloads that are complete since the last call, one entry for each."""
        return self._rooms.unloads.take_done()

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads to start now; each is answered by adapter_ready or adapter_failed."""
        return self._rooms.loads.take()

    def schedule(self) -> Plan | None:
        """Return the next plan, or None if no sequence can make progress now.

        A plan without chunks only ends sequences: a load or an unload waits for their slot. While
        a step is in flight, None may also mean that what comes of it must be known first: where a
        sequence might have to give way to another, nobody is planned ahead.
        """
        assert len(self._in_flight) < MAX_IN_FLIGHT, f"step {self._step} is not committed yet"
        batch = self._plan_ahead(self._in_flight[0]) if self._in_flight else self._plan()
        if batch is None:
            return None
        self._step = batch.step
        self._in_flight.append(batch)
        return Plan(
            step=batch.step,
            ends=self._rooms.running.tell_left(),
            starts=tuple(batch.starts),
            chunks=tuple(batch.chunks.values()),
            copies=self._rooms.cache.take_copies(),
        )

    def commit(self, output: StepOutput) -> list[tuple[int, TokenEvent]]:
        """Apply what came of the oldest step; return (seq_id, event) in plan order."""
        batch = self._in_flight[0] if self._in_flight else None
        assert batch is not None and output.step == batch.step, f"no step {output.step} in flight"
        del self._in_flight[0]
        events = self._rooms.committer.commit(batch, output, next(iter(self._in_flight), None))
        self._settle()
        return events

    def contents(self, observer: CacheObserver) -> None:
        """Tell a late observer what the prefix cache holds; there must have been one all along."""
        self._rooms.cache.contents(observer)

    def stats(self) -> SchedulerStats:
        """Return gauges and counters as of now."""
        return census.stats_of(self._rooms, self._step)

    def check(self) -> None:
        """Assert every invariant that ties the rooms together."""
        census.check(self._rooms)

    def _plan(self) -> Batch | None:
        step = self._step + 1
        self._rooms.turns.advance(step)
        batch = self._rooms.planner.plan(step)
        return batch if batch.chunks or self._must_tell_ends() else None

    def _plan_ahead(self, in_flight: Batch) -> Batch | None:
        step = self._step + 1
        if not self._rooms.turns.is_calm(step):
            return None
        self._rooms.turns.advance(step)
        return self._rooms.planner.plan_ahead(step, in_flight)

    def _must_tell_ends(self) -> bool:
        rooms = self._rooms
        return rooms.running.has_left and (rooms.loads.await_ends or rooms.unloads.is_pending)

    def _end(self, seq_id: int, error: ErrorInfo) -> list[tuple[int, TokenEvent]]:
        sequence, running = self._rooms.sequences.get(seq_id), self._rooms.running.get(seq_id)
        if sequence is None or (running is not None and running.is_ending):
            return []
        self.abort(seq_id)
        return [(seq_id, failure(sequence, error))]

    def _settle(self) -> None:
        """Draw what follows from a change: whose prompt is computed now, what nobody uses now."""
        self._rooms.lobby.release(self._step)
        self._rooms.unloads.settle(self._step)
