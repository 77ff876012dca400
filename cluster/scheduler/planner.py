"""What one step computes: decodes first, then running prefills, then new admissions.

Owns the token budget and the page budget of a step, and who is preempted when pages run out: after
unlocked cached pages in LRU order, the sequence of the lowest priority that arrived last. The
foremost running sequence always gets what it needs, so something always ends. For one that waits,
those give way whom the share policy names.

Where several tenants ask, or did lately, a step has few tokens of the prompts of those who are over
their share; and where a prompt begins whose tenant has had less, they leave that step to it.
"""

from collections.abc import Container

from cluster.scheduler.batch import Batch, end_of, start_of, targets_of
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.paging.kv_cache_manager import KVCacheManager
from cluster.scheduler.policy.share_policy import SharePolicy
from cluster.scheduler.request_queue import DECODE_COST, PREFILL_COST, Fairness, Flow, RequestQueue
from cluster.scheduler.running import RunningSet, fork_source
from cluster.scheduler.sequence import Running, Sequence
from cluster.scheduler.stats import SchedulerCounters
from worker.protocol import PENDING_TOKEN, Chunk

MAX_IN_FLIGHT = 2  # steps: one that the ranks compute, and the one after it
OVER_PART = 8  # of the token budget, for prompts of those who are over their share: one in so many


class Planner:
    """Fills batches; counts what prompts found in the cache."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        running: RunningSet,
        waiting: RequestQueue,
        sequences: dict[int, Sequence],
        fairness: Fairness,
        counters: SchedulerCounters,
    ) -> None:
        self._config = config
        self._page_size = config.page_size
        self._kv = kv
        self._cache = kv.cache
        self._running = running
        self._waiting = waiting
        self._sequences = sequences
        self._fairness = fairness
        self._shares = SharePolicy(config, running, fairness)
        self._counters = counters
        self._deferred_at = 0  # the last step in which anybody's work was left out

    def plan(self, step: int) -> Batch:
        """Return the work of the next step; without chunks if there is none."""
        batch = self._new_batch(step)
        if batch.over and self._waiting.size:
            self._admit_alone(batch, may_preempt=True)
        if self._running.decoding:
            self._decode(batch)
        if self._running.prefilling:
            self._prefill(batch)
        if self._waiting.size:
            self._admit(batch, may_preempt=True)
        return batch

    def plan_ahead(self, step: int, in_flight: Batch) -> Batch | None:
        """Return the work of the step after the one in flight, or None if there is none yet.

        A token that is being drawn is left for the ranks to fill in. A sequence that turns out to
        have ended with it is computed once more, for nothing. Nobody gives way to another here:
        where somebody would have to, there is no such step.
        """
        if self._waiting.size and self._awaits_way():
            return None
        batch = self._new_batch(step)
        if batch.over and self._waiting.size:
            self._admit_alone(batch, may_preempt=False)
        if not self._decode_ahead(batch, in_flight):
            assert not batch.starts, "who was admitted took the room of those that run"
            return None
        for running in tuple(self._running.prefilling):
            chunk = in_flight.chunks.get(running.seq_id)
            if running.is_ending or (chunk is not None and chunk.samples):
                continue
            if running.seq_id in batch.started or batch.defers(running):
                continue
            start = running.num_computed if chunk is None else end_of(chunk)
            self._admit_before(batch, running, may_preempt=False)
            if self._kv.num_available:
                self._continue_prefill(batch, running, start)
        self._admit(batch, may_preempt=False)
        return batch if batch.chunks else None

    def _new_batch(self, step: int) -> Batch:
        self._fairness.tenants.step = step
        over, budget = self._shares.over(), self._config.token_budget
        return Batch(step, budget, over, max(1, budget // OVER_PART))

    def _awaits_way(self) -> bool:
        """Whether somebody would give way to the sequence whose turn it is."""
        seq_id = self._waiting.first()
        if seq_id is None:
            return False
        sequence = self._sequences[seq_id]
        if len(self._running) >= self._config.max_running:
            return self._shares.for_seat(sequence, ()) is not None
        if self._fits(sequence) and self._fits_ends(sequence):
            return False
        return self._for_pages(sequence, ()) is not None

    def _admit_alone(self, batch: Batch, *, may_preempt: bool) -> None:
        """Admit prompts before all else if who is over its share leaves the step to them.

        The step is then as short as without the others. They have the one after it, whoever comes:
        so they go on however many tenants come after each other.
        """
        if self._deferred_at + 1 == batch.step:
            return
        while (seq_id := self._waiting.first()) is not None:
            share = self._sequences[seq_id].flow.share
            deferred = self._shares.deferred_for(share, batch.over)
            if not deferred:
                return
            deferred += tuple(one for one in batch.deferred if one not in deferred)
            reserved = sum(r.sequence.flow.share not in deferred for r in self._running.decoding)
            batch.budget -= reserved
            is_admitted = batch.budget > 0 and self._admit_first(batch, may_preempt)
            batch.budget += reserved
            if not is_admitted:
                return
            self._counters.share_deferrals += not batch.deferred
            batch.deferred, self._deferred_at = deferred, batch.step

    def _decode_ahead(self, batch: Batch, in_flight: Batch) -> bool:
        """Go on with everyone who draws a token now; False, and nothing, if there is no room."""
        # Those that the step in flight leaves out: their last token is known.
        idle = [
            running
            for running in (self._running.decoding if in_flight.deferred else ())
            if running.seq_id not in in_flight.chunks
            and not (running.is_ending or batch.defers(running))
        ]
        drawing: list[tuple[Running, int]] = []
        forced: list[tuple[Running, int]] = []  # what is drawn there is known already
        num_new_pages = sum(self._is_full(running, running.num_computed) for running in idle)
        for chunk in in_flight.chunks.values():
            running, start = self._running.get(chunk.seq_id), end_of(chunk)
            assert running is not None, f"sequence {chunk.seq_id} left while its step ran"
            sequence = running.sequence
            if not chunk.samples or running.is_ending or start + 1 >= sequence.token_limit:
                continue
            if batch.defers(running):
                continue
            if start < len(sequence.tokens):
                forced.append((running, start))
            else:
                drawing.append((running, start))
                num_new_pages += self._is_full(running, start)
        if num_new_pages > self._kv.num_available:
            return False
        costs: dict[Flow, int] = {}
        known = [(one, one.num_computed, one.sequence.tokens[one.num_computed]) for one in idle]
        pending = [(running, start, PENDING_TOKEN) for running, start in drawing]
        for running, start, token in known + pending:
            self._keep_prompt_state(batch, running, start)
            pages, window_pages = self._kv.allocate(running, int(self._is_full(running, start)))
            batch.put(Chunk(running.seq_id, start, (token,), pages, True, (), window_pages))
            flow = running.sequence.flow
            costs[flow] = costs.get(flow, 0) + DECODE_COST
        if self._fairness.enabled:
            self._charge(costs)
        for running, start in forced:
            if self._kv.num_available:
                self._continue_prefill(batch, running, start)
        return True

    def _decode(self, batch: Batch) -> None:
        """Give every decoding sequence its token; the budget holds them all by construction."""
        decoding, page_size, chunks = self._running.decoding, self._page_size, batch.chunks
        at, num_before = 0, len(chunks)
        while at < len(decoding):
            running = decoding[at]
            if batch.deferred and batch.defers(running):
                at += 1
                continue
            start = running.num_computed
            pages: tuple[int, ...] = ()
            window_pages: tuple[int, ...] = ()
            if start == len(running.pages) * page_size:
                if not self._has_room(running, batch):
                    break  # it gave way itself, and all after it before
                self._keep_prompt_state(batch, running, start)
                pages, window_pages = self._kv.allocate(running, 1)
            sequence = running.sequence
            assert start == len(sequence.tokens) - 1, f"sequence {sequence.seq_id} is no decode"
            last_token = (sequence.tokens[start],)
            chunk = Chunk(sequence.seq_id, start, last_token, pages, True, (), window_pages)
            chunks[sequence.seq_id] = chunk
            at += 1
        batch.budget -= len(chunks) - num_before
        if self._fairness.enabled:
            costs: dict[Flow, int] = {}
            for running in decoding:
                if batch.deferred and batch.defers(running):
                    continue
                flow = running.sequence.flow
                costs[flow] = costs.get(flow, 0) + DECODE_COST
            self._charge(costs)

    def _prefill(self, batch: Batch) -> None:
        for running in tuple(self._running.prefilling):
            if running.seq_id in batch.started or batch.defers(running):
                continue
            if self._running.get(running.seq_id) is running:
                self._admit_before(batch, running, may_preempt=True)
            if self._running.get(running.seq_id) is not running:
                continue  # preempted for another one in this very step
            start = running.num_computed
            end = self._chunk_end(batch, running.sequence, start)
            if end > start and self._has_room(running, batch):
                self._continue_prefill(batch, running, start)

    def _continue_prefill(self, batch: Batch, running: Running, start: int) -> None:
        """Compute as much of the known tokens as budget and pages allow."""
        end = min(self._chunk_end(batch, running.sequence, start), self._reach(running))
        if end > start:
            self._put_chunk(batch, running, start, end)

    def _reach(self, running: Running) -> int:
        """Return the positions for which there are pages, of windows as well."""
        return (len(running.pages) + self._kv.num_available) * self._page_size

    def _admit_before(self, batch: Batch, running: Running, *, may_preempt: bool) -> None:
        """Admit other tenants' sequences whose turn comes before the next chunk of a prefill.

        Among those of one priority: a long prompt does not hold up whoever has had less.
        """
        own = running.sequence.flow.share
        while batch.budget > 0 and (seq_id := self._waiting.first()) is not None:
            other = self._sequences[seq_id].flow.share
            comes_first = other.priority == own.priority and other.counter < own.counter
            if not (comes_first and self._admit_first(batch, may_preempt)):
                return

    def _admit(self, batch: Batch, *, may_preempt: bool) -> None:
        while batch.budget > 0 and self._admit_first(batch, may_preempt):
            continue

    def _admit_first(self, batch: Batch, may_preempt: bool) -> bool:
        """Admit the sequence whose turn it is; False if there is none, or no room for it."""
        seq_id = self._waiting.first()
        if seq_id is None:
            return False
        sequence = self._sequences[seq_id]
        if sequence.flow.share in batch.deferred or not batch.room_for(sequence.flow.tenant):
            return False
        if len(self._running) >= self._config.max_running:
            victim = self._shares.for_seat(sequence, batch.started) if may_preempt else None
            if victim is None:
                return False
            self._give_way(batch, victim)
        while not (self._fits(sequence) and self._fits_ends(sequence)):
            victim = self._for_pages(sequence, batch.started) if may_preempt else None
            if victim is None:
                return False
            self._give_way(batch, victim)
        match = self._kv.match(sequence)
        source = fork_source(self._running, sequence, match)
        start = match.num_pages * self._page_size if source is None else len(sequence.tokens) - 1
        end = self._chunk_end(batch, sequence, start)  # who gave way may have left room
        if end == start:
            return False
        self._waiting.remove(seq_id, sequence.flow)
        self._fairness.admitted(sequence.flow)
        running = self._running.admit(sequence, match, batch.step)
        if source is not None:
            self._kv.fork(running, source, start)
            self._counters.forked_sequences += 1
        self._count(sequence, start)
        batch.starts.append(start_of(running))
        batch.started.add(seq_id)
        self._put_chunk(batch, running, running.num_computed, min(end, self._reach(running)))
        return True

    def _give_way(self, batch: Batch, victim: Running) -> None:
        batch.drop(victim.seq_id)
        self._running.preempt(victim, batch.step)
        self._counters.share_preemptions += 1

    def _charge(self, costs: dict[Flow, int]) -> None:
        for flow, cost in costs.items():
            self._fairness.charge(flow, cost)
            self._waiting.charged(flow)

    def _put_chunk(self, batch: Batch, running: Running, start: int, end: int) -> None:
        tokens = running.sequence.tokens
        self._kv.keep_state(running, start, batch.step)
        num_new = self._kv.num_pages(end) - len(running.pages)
        pages, window_pages = self._kv.allocate(running, num_new)
        samples = end == len(tokens)
        targets = targets_of(running, start, end)
        token_ids = tuple(tokens[start:end])
        flow = running.sequence.flow
        batch.put(Chunk(running.seq_id, start, token_ids, pages, samples, targets, window_pages))
        if flow.tenant in batch.over:
            batch.over_budget -= end - start
        self._charge({flow: (end - start) * PREFILL_COST})

    def _chunk_end(self, batch: Batch, sequence: Sequence, start: int) -> int:
        """Return where a chunk from `start` ends: at a page boundary unless it is the last.

        Of who may compute less than a page it ends anywhere.
        """
        tenant, num_tokens = sequence.flow.tenant, len(sequence.tokens)
        end = min(num_tokens, start + min(batch.room_for(tenant), self._config.max_chunk))
        end = self._kv.next_checkpoint(sequence, start, end)
        aligned = end - end % self._page_size
        if end == num_tokens or (aligned <= start and tenant in batch.over):
            return end
        return max(start, aligned)

    def _keep_prompt_state(self, batch: Batch, running: Running, start: int) -> None:
        """Keep the state before a prompt's last token where that is all that was left of it."""
        if start < running.sequence.num_prompt_tokens:
            self._kv.keep_state(running, start, batch.step)

    def _is_full(self, running: Running, start: int) -> bool:
        """Whether a token at `start` needs a page more."""
        return start == len(running.pages) * self._page_size

    def _fits(self, sequence: Sequence) -> bool:
        """Tell whether all known tokens fit beside what the running ones will soon need."""
        num_pages, num_reserved = (
            self._kv.num_pages(len(sequence.tokens)),
            self._running.num_reserved,
        )
        # A long prompt that waits for pages, and could not fit whatever a match finds, is not
        # matched at every step.
        if num_pages + num_reserved > self._cache.num_available + self._cache.num_locked:
            return False
        match = self._kv.match(sequence)
        available = self._cache.num_available - match.num_unlocked
        return num_pages - len(match.pages) + num_reserved <= available

    def _fits_ends(self, sequence: Sequence) -> bool:
        """Tell the same of layers that keep only the end of a prefix."""
        return self._kv.fits_ends(sequence, self._running.num_window_reserved)

    def _for_pages(self, sequence: Sequence, spared: Container[int]) -> Running | None:
        """Return who should leave its pages to a sequence for which there is no room."""
        num_pages, windows = self._kv.num_pages(len(sequence.tokens)), self._kv.windows
        if windows is None or not self._fits(sequence):
            return self._shares.for_pages(sequence, num_pages, spared)
        return self._shares.for_window_pages(sequence, windows.need(num_pages), spared)

    def _has_room(self, running: Running, batch: Batch) -> bool:
        """Make sure that a page can be had, preempting the hindmost until it can.

        False if `running` must go without: a decode then gives way itself. A prefill keeps what it
        holds, unless it is alone: then its own duplicates are in its way, and a match has none.
        """
        while self._kv.num_available == 0:
            victim = self._running.hindmost(batch.started)
            if victim is running and not running.is_decoding and len(self._running) > 1:
                return False
            batch.drop(victim.seq_id)
            self._running.preempt(victim, batch.step)
            if victim is running:
                return False
        return True

    def _count(self, sequence: Sequence, num_cached_tokens: int) -> None:
        if sequence.num_cached_tokens is None:  # a return after a preemption does not count
            sequence.num_cached_tokens = num_cached_tokens
            self._counters.prompt_tokens += sequence.num_prompt_tokens
            self._counters.cached_prompt_tokens += num_cached_tokens
