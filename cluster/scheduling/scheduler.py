"""The decision maker: requests and step outputs in, plans and token events out.

A deterministic state machine: the same calls give the same plans byte for byte. Owns the order of
decisions and the life of each sequence; the rooms beside this one own the parts. Knows neither
clock nor transport. When a group of ranks fails, its scheduler is thrown away.

Call `schedule` after any other call, then `take_unloaded` and `take_loads`: what an unload has
freed may be what a load needs. It may be called once more while a step is in flight: the ranks then
go from one step to the next without waiting for anybody.
"""

from cluster.errors import Conflict
from cluster.request import ErrorInfo, Request, TokenEvent
from cluster.scheduling.batch import MAX_IN_FLIGHT, Batch
from cluster.scheduling.cache_events import CacheObserver
from cluster.scheduling.committer import Committer
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.fair_share import FairShare
from cluster.scheduling.holdings import Holdings
from cluster.scheduling.lobby import Lobby
from cluster.scheduling.outcome import EXPIRED, UNLOADED, failure
from cluster.scheduling.prefix_cache import PrefixCache
from cluster.scheduling.retraction import Retraction
from cluster.scheduling.running_set import RunningSet
from cluster.scheduling.sequence import Sequence, Status
from cluster.scheduling.slot_table import SlotTable
from cluster.scheduling.slot_turns import SlotTurns
from cluster.scheduling.stats import AdapterLoad, SchedulerStats, SlotStats, UnloadedAdapter
from cluster.scheduling.step_planner import StepPlanner
from cluster.scheduling.unloads import Unloads
from cluster.scheduling.waiting_queue import WaitingQueue
from worker.protocol import Plan, StepOutput


class Scheduler:
    """Continuous batching over one base model and many adapters."""

    def __init__(self, config: SchedulerConfig, observer: CacheObserver | None = None) -> None:
        assert config.num_pages > 0, "the ranks have said how many pages fit"
        self._config = config
        self._step = 0
        self._sequences: dict[int, Sequence] = {}  # waiting or running
        self._in_flight: list[Batch] = []  # steps that are not committed, the oldest first
        self._cache = PrefixCache(config.num_pages, config.num_host_pages, observer)
        self._slots = SlotTable(config.num_slots, config.adapter_memory)
        self._waiting = WaitingQueue()
        self._running = RunningSet()
        self._shares = FairShare(config.fairness)
        self._holdings = Holdings(
            self._cache, self._slots, config.page_size, keeps_pages=config.prefix_cache
        )
        self._committer = Committer(self._holdings, self._running, self._sequences, self._shares)
        self._retraction = Retraction(self._holdings, self._running, self._waiting)
        self._turns = SlotTurns(config, self._slots, self._waiting, self._running, self._retraction)
        self._unloads = Unloads(self._cache, self._slots, self._turns, self._waiting, self._running)
        self._lobby = Lobby(
            config,
            self._waiting,
            self._shares,
            self._slots,
            self._turns,
            self._unloads,
            self._sequences,
        )
        self._planner = StepPlanner(
            config,
            self._cache,
            self._holdings,
            self._running,
            self._waiting,
            self._retraction,
            self._sequences,
            self._shares,
        )

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
        return self._lobby.add_all(requests, self._step)

    def abort(self, seq_id: int) -> None:
        """End a sequence without an event, at a commit if a step is in flight.

        A sequence that is unknown or has ended is ignored.
        """
        running = self._running.get(seq_id)
        if running is not None and self._in_flight:
            self._committer.end_at_commit(running)
        elif running is not None:
            self._committer.finish(running, self._step)
        elif seq_id in self._sequences:
            self._lobby.drop(seq_id, self._step)
        self._settle()

    def expire(self, seq_id: int) -> list[tuple[int, TokenEvent]]:
        """End a sequence whose deadline has passed and return the event that says so.

        This is how time enters. A sequence that is unknown, has ended or is about to is ignored.
        """
        return self._end(seq_id, EXPIRED)

    def adapter_ready(self, adapter: str) -> None:
        """Let plans use an adapter that every rank has loaded into the slot it was given."""
        self._turns.ready(adapter, self._step)
        self._settle()

    def adapter_failed(self, adapter: str, error: ErrorInfo) -> list[tuple[int, TokenEvent]]:
        """Give up a load; end the requests that wait for it, and only those, with `error`."""
        dropped = self._lobby.drop_adapter(adapter, self._step)
        events = [(sequence.seq_id, failure(sequence, error)) for sequence in dropped]
        self._turns.free(adapter, self._step)
        self._settle()
        return events

    def upcoming(self) -> tuple[str, ...]:
        """Return the adapters that will be loaded next, the first in front; changes nothing."""
        return self._turns.upcoming

    def pin(self, digest: str, num_bytes: int = 0) -> None:
        """Keep an adapter in its slot, now or once it is there; it claims `num_bytes`.

        Raises:
            Conflict: if no slot would be left for all the others, or too little memory.
        """
        if self._slots.is_pinned(digest):
            return
        if self._slots.num_pinned + 1 >= self._config.num_slots:
            raise Conflict(
                f"{self._slots.num_pinned} of {self._config.num_slots} adapter slots are pinned; "
                "one must stay free for the other adapters"
            )
        pinned, memory = self._slots.pinned_bytes, self._config.adapter_memory
        if memory and pinned + num_bytes + self._turns.largest_besides(digest) > memory:
            raise Conflict(
                f"{pinned} of {memory} bytes for adapters are pinned; {num_bytes} more would leave "
                "too little for the other adapters"
            )
        self._turns.pin(digest, num_bytes, self._step)

    def unpin(self, digest: str) -> None:
        """Let an adapter be evicted again when it is idle."""
        self._slots.unpin(digest)

    def unload(self, digest: str, *, force: bool = False) -> list[tuple[int, TokenEvent]]:
        """Refuse new requests for an adapter, let those it has end, then forget it wholly.

        Sums that it is a part of go with it. With `force` those it has end now, by the events that
        are returned. The adapter may be used again as soon as `take_unloaded` has named it, or
        after `allow`. Calling this again before that changes nothing, and is answered by the same
        entry.

        Raises:
            Conflict: for the base model.
        """
        self._unloads.fence(digest)
        events: list[tuple[int, TokenEvent]] = []
        if force:
            for adapter in self._unloads.users(digest):
                dropped = self._lobby.drop_adapter(adapter, self._step)
                events += [(sequence.seq_id, failure(sequence, UNLOADED)) for sequence in dropped]
                for running in self._running.of_adapter(adapter):
                    events += self._end(running.seq_id, UNLOADED)
        self._settle()
        return events

    def allow(self, digest: str) -> None:
        """Take an unload back that is not complete yet; `take_unloaded` says that nothing went."""
        self._unloads.unfence(digest)

    def take_unloaded(self) -> list[UnloadedAdapter]:
        """Return the unloads that are complete since the last call, one entry for each."""
        return self._unloads.take_done()

    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads to start now; each is answered by adapter_ready or adapter_failed."""
        return self._turns.take_loads()

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
            ends=self._running.tell_left(),
            starts=tuple(batch.starts),
            chunks=tuple(batch.chunks.values()),
            copies=self._cache.take_copies(),
        )

    def commit(self, output: StepOutput) -> list[tuple[int, TokenEvent]]:
        """Apply what came of the oldest step; return (seq_id, event) in plan order."""
        batch = self._in_flight[0] if self._in_flight else None
        assert batch is not None and output.step == batch.step, f"no step {output.step} in flight"
        del self._in_flight[0]
        events = self._committer.commit(batch, output, next(iter(self._in_flight), None))
        self._settle()
        return events

    def contents(self, observer: CacheObserver) -> None:
        """Tell a late observer what the prefix cache holds; there must have been one all along."""
        self._cache.contents(observer)

    def stats(self) -> SchedulerStats:
        """Return gauges and counters as of now."""
        cache = self._cache
        return SchedulerStats(
            step=self._step,
            num_running=len(self._running),
            num_waiting=len(self._lobby),
            num_waiting_for_adapter=self._waiting.num_shut,
            free_pages=cache.pool.num_free,
            cached_pages=cache.num_unlocked,
            held_pages=self._config.num_pages - cache.num_available,
            total_pages=self._config.num_pages,
            num_slots=self._config.num_slots,
            adapter_memory=self._config.adapter_memory,
            slots=tuple(
                SlotStats(r.slot, r.adapter, r.loading, r.leases, r.pinned, r.num_bytes)
                for r in self._slots.residents()
            ),
            prompt_tokens=self._planner.prompt_tokens,
            cached_prompt_tokens=self._planner.cached_prompt_tokens,
            generated_tokens=self._committer.generated_tokens,
            retractions=self._retraction.count,
            evicted_pages=cache.num_evicted,
            adapter_loads=self._slots.num_loads,
            longest_slot_wait=self._turns.longest_wait,
            longest_turn_start=self._slots.longest_turn_start,
            slot_wait_bound=self._turns.wait_bound,
            free_host_pages=cache.host_pool.num_free,
            cached_host_pages=cache.num_host_cached,
            total_host_pages=self._config.num_host_pages,
            saved_pages=cache.num_saved,
            restored_pages=cache.num_restored,
            evicted_host_pages=cache.num_host_evicted,
            forked_sequences=self._planner.num_forks,
        )

    def check(self) -> None:
        """Assert every invariant that ties the rooms together."""
        running = self._running.all()
        self._cache.check([page for r in running for page in r.private_pages()])
        self._slots.check()
        self._turns.check()
        leases: dict[str, int] = {}
        for r in running:
            assert r.sequence.status is Status.RUNNING, f"{r.seq_id} holds pages without running"
            if r.slot is not None:
                leases[r.adapter] = leases.get(r.adapter, 0) + 1
        for resident in self._slots.residents():
            assert resident.leases == leases.get(resident.adapter, 0), "leases do not balance"
        assert len(self._sequences) == len(running) + len(self._lobby), "a sequence is lost"

    def _plan(self) -> Batch | None:
        step = self._step + 1
        self._turns.advance(step)
        batch = self._planner.plan(step)
        return batch if batch.chunks or self._must_tell_ends() else None

    def _plan_ahead(self, in_flight: Batch) -> Batch | None:
        step = self._step + 1
        if not self._turns.is_calm(step):
            return None
        self._turns.advance(step)
        return self._planner.plan_ahead(step, in_flight)

    def _must_tell_ends(self) -> bool:
        return self._running.has_left and (self._turns.awaits_ends or self._unloads.is_pending)

    def _end(self, seq_id: int, error: ErrorInfo) -> list[tuple[int, TokenEvent]]:
        sequence, running = self._sequences.get(seq_id), self._running.get(seq_id)
        if sequence is None or (running is not None and running.is_ending):
            return []
        self.abort(seq_id)
        return [(seq_id, failure(sequence, error))]

    def _settle(self) -> None:
        """Draw what follows from a change: whose prompt is computed now, what nobody uses now."""
        self._lobby.release(self._step)
        self._unloads.settle(self._step)
