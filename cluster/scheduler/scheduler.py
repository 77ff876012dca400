"""The scheduler: requests and step outputs in, plans and token events out.

A deterministic state machine: the same events give the same plans byte for byte, without clock or
transport. Every call that changes it handles an event (`cluster.scheduler.event_handlers`). When a
group of ranks fails, its scheduler is thrown away.

Call `schedule` after any other call, then `take_unloaded` and `take_loads`: what an unload has
freed may be what a load needs. It may be called once more while a step is in flight: the ranks then
go from one step to the next without waiting for anybody.
"""

from copy import copy

from cluster.errors import ErrorInfo
from cluster.request import Request, TokenEvent
from cluster.scheduler import events
from cluster.scheduler.admission import Admission
from cluster.scheduler.batch import Batch
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.event_handlers import EventHandlers, handles
from cluster.scheduler.kv_cache.checkpoint_pool import PoolSize
from cluster.scheduler.kv_cache.events import CacheObserver
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.paging.kv_cache_manager import KVCacheManager
from cluster.scheduler.parallel_sampling import ParallelSamplingGroups
from cluster.scheduler.planner import MAX_IN_FLIGHT, Planner
from cluster.scheduler.policy.adapter_unloads import Unloads
from cluster.scheduler.policy.lora_slot_policy import SlotPolicy
from cluster.scheduler.policy.lora_slot_queue import SlotQueue
from cluster.scheduler.policy.share_policy import SlotShares
from cluster.scheduler.request_queue import Fairness, RequestQueue
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Sequence, Status
from cluster.scheduler.stats import (
    AdapterLoad,
    CacheReset,
    SchedulerCounters,
    SchedulerStats,
    SlotStats,
    UnloadedAdapter,
)
from cluster.scheduler.update_from_output import EXPIRED, UNLOADED, OutputUpdater, failure
from cluster.tenancy.shared_room import SharedRoom
from worker.protocol import Plan, StepOutput


class Scheduler(EventHandlers):
    """Continuous batching over one base model and many adapters."""

    def __init__(
        self,
        config: SchedulerConfig,
        observer: CacheObserver | None = None,
        journal: events.Journal | None = None,
    ) -> None:
        """Make the parts and join them.

        Args:
            config: the limits; the ranks have said how many pages fit.
            observer: hears of changes of the prefix cache.
            journal: hears of every event.
        """
        assert config.num_pages > 0, "the ranks have said how many pages fit"
        super().__init__(journal)
        self.config = config
        self._step = 0
        self._in_flight: list[Batch] = []  # steps that are not committed, the oldest first
        self._sequences: dict[int, Sequence] = {}  # that wait or run, by arrival number
        self._counters = counters = SchedulerCounters()
        room = SharedRoom(config.max_waiting)
        self._waiting = RequestQueue(room)
        self._groups = ParallelSamplingGroups(room)
        self._fairness = Fairness(config.fairness)
        self._cache = PrefixCache(
            config.num_pages, config.num_host_pages, observer, counters, _checkpointed(config)
        )
        kv = KVCacheManager(self._cache, config)
        self._slots = SlotTable(config.num_slots, config.adapter_memory, counters)
        self._running = RunningSet(kv, self._slots, self._waiting, counters)
        tenants = self._fairness.tenants
        self._slot_queue = SlotQueue(config, self._slots, self._waiting, tenants, counters)
        shares = SlotShares(self._slots, self._waiting, tenants)
        self._slot_policy = SlotPolicy(
            config, self._slots, self._slot_queue, self._waiting, self._running, shares
        )
        self._unloads = Unloads(
            self._cache, self._slots, self._slot_policy, self._waiting, self._running
        )
        self._admission = Admission(
            config,
            self._waiting,
            self._groups,
            self._fairness,
            self._slots,
            self._slot_queue,
            self._slot_policy,
            self._unloads,
            self._sequences,
        )
        self._planner = Planner(
            config, kv, self._running, self._waiting, self._sequences, self._fairness, counters
        )
        self._outputs = OutputUpdater(
            kv, self._running, self._groups, self._sequences, self._fairness, counters
        )

    def add(self, request: Request) -> int:
        """Queue a request and return its arrival number: 1, 2, 3, ...; raises as `add_all` does."""
        return self.add_all((request,))[0]

    @handles(events.AddAll)
    def add_all(self, requests: tuple[Request, ...], resumes: bool = False) -> list[int]:
        """Queue the choices of one prompt, all or none, and return their arrival numbers.

        The first computes the prompt; the others start on its pages when it has. A request that
        had been let in before, and was lost with its ranks or scheduler, `resumes`: it is let in
        however many wait, and goes on behind its `output_token_ids` with the tokens that would
        have come.

        Raises:
            InvalidRequest: if they could never be served, or are not choices of one prompt.
            NotFound: if their adapter is being unloaded.
            Overloaded: if more than `max_waiting` sequences would wait, or more of their tenant
                than it may have of them.
        """
        return self._admission.add_all(requests, self._step, resumes=resumes)

    @handles(events.Abort)
    def abort(self, seq_id: int) -> None:
        """End a sequence without an event, at a commit if a step is in flight.

        A sequence that is unknown or has ended is ignored.
        """
        self._abort(seq_id)

    @handles(events.Expire)
    def expire(self, seq_id: int) -> list[tuple[int, TokenEvent]]:
        """End a sequence whose deadline has passed and return the event that says so.

        This is how time enters. A sequence that is unknown, has ended or is about to is ignored.
        """
        return self._end(seq_id, EXPIRED)

    @handles(events.AdapterReady)
    def adapter_ready(self, adapter: str) -> None:
        """Let plans use an adapter that every rank has loaded into the slot it was given."""
        self._slot_policy.ready(adapter, self._step)
        self._settle()

    @handles(events.AdapterFailed)
    def adapter_failed(self, adapter: str, error: ErrorInfo) -> list[tuple[int, TokenEvent]]:
        """Give up a load; end the requests that wait for it, and only those, with `error`."""
        dropped = self._admission.drop_adapter(adapter, self._step)
        news = [(sequence.seq_id, failure(sequence, error)) for sequence in dropped]
        self._slot_policy.free(adapter, self._step)
        self._settle()
        return news

    def upcoming(self) -> tuple[str, ...]:
        """Return the adapters that will be loaded next, the first in front; changes nothing."""
        return self._slot_queue.upcoming

    @handles(events.Pin)
    def pin(self, digest: str, num_bytes: int = 0) -> None:
        """Keep an adapter in its slot, now or once it is there; it claims `num_bytes`.

        Raises:
            Conflict: if no slot would be left for all the others, or too little memory.
        """
        self._slot_policy.pin(digest, num_bytes, self._step)

    @handles(events.Unpin)
    def unpin(self, digest: str) -> None:
        """Let an adapter be evicted again when it is idle."""
        self._slot_policy.unpin(digest)

    @handles(events.Unload)
    def unload(self, digest: str, force: bool = False) -> list[tuple[int, TokenEvent]]:
        """Refuse new requests for an adapter, let those it has end, then forget it wholly.

        Sums that it is a part of go with it. With `force` those it has end now, by the events that
        are returned. The adapter may be used again as soon as `take_unloaded` has named it, or
        after `allow`. Calling this again before that changes nothing, and is answered by the same
        entry.

        Raises:
            Conflict: for the base model.
        """
        self._unloads.fence(digest)
        news: list[tuple[int, TokenEvent]] = []
        if force:
            for adapter in self._unloads.users(digest):
                dropped = self._admission.drop_adapter(adapter, self._step)
                news += [(sequence.seq_id, failure(sequence, UNLOADED)) for sequence in dropped]
                for running in self._running.of_adapter(adapter):
                    news += self._end(running.seq_id, UNLOADED)
        self._settle()
        return news

    @handles(events.Allow)
    def allow(self, digest: str) -> None:
        """Take an unload back that is not complete yet; `take_unloaded` says that nothing went."""
        self._unloads.unfence(digest)

    @handles(events.ResetPrefixCache)
    def reset_prefix_cache(self) -> CacheReset:
        """Forget all cached prefixes that no running sequence uses, on both tiers.

        What running sequences have computed stays, and is cached when they end.
        """
        return self._cache.reset()

    @handles(events.TakeUnloaded)
    def take_unloaded(self) -> list[UnloadedAdapter]:
        """Return the unloads that are complete since the last call, one entry for each."""
        return self._unloads.take_done()

    @handles(events.TakeLoads)
    def take_loads(self) -> list[AdapterLoad]:
        """Return the loads to start now; each is answered by adapter_ready or adapter_failed."""
        return self._slot_policy.take_loads()

    @handles(events.Schedule)
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
            ends=self._running.take_left(),
            starts=tuple(batch.starts),
            chunks=tuple(batch.chunks.values()),
            copies=self._cache.take_copies(),
        )

    @handles(events.Commit)
    def commit(self, output: StepOutput) -> list[tuple[int, TokenEvent]]:
        """Apply what came of the oldest step; return (seq_id, event) in plan order."""
        batch = self._in_flight[0] if self._in_flight else None
        assert batch is not None and output.step == batch.step, f"no step {output.step} in flight"
        del self._in_flight[0]
        following = self._in_flight[0] if self._in_flight else None
        news = self._outputs.commit(batch, output, following)
        self._settle()
        return news

    def contents(self, observer: CacheObserver) -> None:
        """Tell a late observer what the prefix cache holds; there must have been one all along."""
        self._cache.contents(observer)

    def stats(self) -> SchedulerStats:
        """Return gauges and counters as of now."""
        config, cache = self.config, self._cache
        return SchedulerStats(
            step=self._step,
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._groups),
            num_waiting_for_adapter=self._waiting.num_shut,
            total_pages=config.num_pages,
            free_pages=cache.pool.num_free,
            cached_pages=cache.num_unlocked,
            held_pages=config.num_pages - cache.num_available,
            total_host_pages=config.num_host_pages,
            free_host_pages=cache.host_pool.num_free,
            cached_host_pages=cache.num_host_cached,
            **self._stats_of_ends(),
            num_slots=config.num_slots,
            adapter_memory=config.adapter_memory,
            slot_wait_bound=self._slot_queue.wait_bound,
            longest_slot_wait=self._slot_queue.longest_wait,
            longest_turn_start=self._slots.longest_turn_start,
            slots=tuple(
                SlotStats(r.slot, r.adapter, r.loading, r.leases, r.pinned, r.num_bytes)
                for r in self._slots.residents()
            ),
            counters=copy(self._counters),
        )

    def _stats_of_ends(self) -> dict[str, int]:
        """Return the gauges of layers that keep only the end of a prefix."""
        config, pool = self.config, self._cache.checkpoints
        if pool is None:
            return {}
        kind = "window" if config.window else "state"
        return {
            f"total_{kind}_pages": pool.device.num_pages,
            f"free_{kind}_pages": pool.device.num_free,
            f"cached_{kind}_pages": pool.num_cached,
            f"held_{kind}_pages": pool.device.num_pages - pool.num_available,
            f"total_host_{kind}_pages": pool.host.num_pages,
            f"free_host_{kind}_pages": pool.host.num_free,
            "num_checkpoints": pool.num_checkpoints,
        }

    def check(self) -> None:
        """Assert every invariant that ties the parts together."""
        config, running = self.config, self._running.all()
        assert self._slots.num_slots == config.num_slots, "slots appear or vanish"
        assert self._cache.pool.num_pages == config.num_pages, "pages appear or vanish"
        assert self._cache.host_pool.num_pages == config.num_host_pages, "host pages do"
        self._cache.check(
            [page for r in running for page in r.private_pages()],
            held=[page for r in running for page in (*r.window_pages, *r.state_pages)],
        )
        for r in running if config.window else ():
            assert r.first_window + len(r.window_pages) == len(r.pages), "tables of two lengths"
            first = max(0, r.num_computed // config.page_size - config.pages_behind)
            assert r.first_window <= first, "a page has left the window too early"
        self._slots.check()
        self._slot_queue.check()
        self._slot_policy.check()
        leases: dict[str, int] = {}
        for r in running:
            assert r.sequence.status is Status.RUNNING, f"{r.seq_id} holds pages without running"
            if r.slot is not None:
                leases[r.adapter] = leases.get(r.adapter, 0) + 1
        for resident in self._slots.residents():
            assert resident.leases == leases.get(resident.adapter, 0), "leases do not balance"
        num_waiting = len(self._waiting) + len(self._groups)
        assert len(self._sequences) == len(running) + num_waiting, "a sequence is lost"
        assert self._waiting.room.num_held == num_waiting, "places for those that wait are lost"
        for sequence in self._sequences.values():
            version, num_pages = sequence.matched_at
            if sequence.match and version == self._cache.version(sequence.namespace):
                found = self._cache.match(sequence.namespace, sequence.keys(num_pages))
                assert found == sequence.match, "a match that was kept is stale"

    def _abort(self, seq_id: int) -> None:
        running = self._running.get(seq_id)
        if running is not None and self._in_flight:
            self._outputs.end_at_commit(running)
        elif running is not None:
            self._outputs.finish(running, self._step)
        elif seq_id in self._sequences:
            self._admission.drop(seq_id, self._step)
        self._settle()

    def _plan(self) -> Batch | None:
        step = self._step + 1
        self._slot_policy.advance(step)
        batch = self._planner.plan(step)
        return batch if batch.chunks or self._must_tell_ends() else None

    def _plan_ahead(self, in_flight: Batch) -> Batch | None:
        step = self._step + 1
        if not self._slot_policy.may_plan_ahead(step):
            return None
        self._slot_policy.advance(step)
        return self._planner.plan_ahead(step, in_flight)

    def _must_tell_ends(self) -> bool:
        return self._running.has_left and (
            self._slot_policy.loads_await_ends or bool(self._unloads.fenced)
        )

    def _end(self, seq_id: int, error: ErrorInfo) -> list[tuple[int, TokenEvent]]:
        sequence, running = self._sequences.get(seq_id), self._running.get(seq_id)
        if sequence is None or (running is not None and running.is_ending):
            return []
        self._abort(seq_id)
        return [(seq_id, failure(sequence, error))]

    def _settle(self) -> None:
        """Do what follows from a change: let held sequences wait, complete unloads."""
        if self._groups.has_released:
            self._admission.release(self._step)
        if self._unloads.fenced:
            self._unloads.settle(self._step)


def _checkpointed(config: SchedulerConfig) -> PoolSize | None:
    """Return the pool of the layers that keep only the end of a prefix, if there are any."""
    num_window, num_host_window = config.num_window_pages, config.num_host_window_pages
    if config.window:
        return PoolSize("window", num_window, num_host_window, config.page_size)
    num_states, num_host_states = config.num_state_pages, config.num_host_state_pages
    if num_states:
        return PoolSize("state", num_states, num_host_states, config.page_size)
    return None
