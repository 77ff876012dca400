"""What one step computes: decodes first, then running prefills, then new admissions.

Owns the token budget and the page budget of a step, and who is preempted when pages run out: after
unlocked cached pages in LRU order, the sequence of the lowest priority that arrived last. The
foremost running sequence always gets what it needs, so something always ends. For one that waits,
those give way whom the share policy names.
"""

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.radix_tree import Match
from cluster.scheduler.kv_cache_manager import KVCacheManager
from cluster.scheduler.request_queue import DECODE_COST, PREFILL_COST, Fairness, Flow, RequestQueue
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Running, Sequence
from cluster.scheduler.share_policy import SharePolicy
from cluster.scheduler.stats import SchedulerCounters
from worker.protocol import PENDING_TOKEN, Chunk, SequenceStart

MAX_IN_FLIGHT = 2  # steps: one that the ranks compute, and the one after it


class Batch:
    """A step in the making."""

    __slots__ = ("budget", "chunks", "started", "starts", "step")

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget  # tokens left
        self.starts: list[SequenceStart] = []
        self.started: set[int] = set()  # the sequences of these: they do not give way in this step
        self.chunks: dict[int, Chunk] = {}  # by sequence, in plan order

    def put(self, chunk: Chunk) -> None:
        """Add a chunk at the end."""
        self.chunks[chunk.seq_id] = chunk
        self.budget -= len(chunk.token_ids)

    def drop(self, seq_id: int) -> None:
        """Take a chunk out again, if there is one."""
        if seq_id in self.chunks:
            self.budget += len(self.chunks.pop(seq_id).token_ids)


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

    def plan(self, step: int) -> Batch:
        """Return the work of the next step; without chunks if there is none."""
        batch = Batch(step, self._config.token_budget)
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
        have ended with it is computed once more, for nothing. Nobody gives way to another here.
        """
        batch = Batch(step, self._config.token_budget)
        if not self._decode_ahead(batch, in_flight):
            return None
        for running in tuple(self._running.prefilling):
            chunk = in_flight.chunks.get(running.seq_id)
            if running.is_ending or (chunk is not None and chunk.samples):
                continue
            start = running.num_computed if chunk is None else end_of(chunk)
            self._admit_before(batch, running, may_preempt=False)
            if self._cache.num_available:
                self._continue_prefill(batch, running, start)
        self._admit(batch, may_preempt=False)
        return batch if batch.chunks else None

    def _decode_ahead(self, batch: Batch, in_flight: Batch) -> bool:
        """Go on with everyone who draws a token now; False, and nothing, if there is no room."""
        drawing: list[tuple[Running, int]] = []
        forced: list[tuple[Running, int]] = []  # what is drawn there is known already
        num_new_pages = 0
        for chunk in in_flight.chunks.values():
            running, start = self._running.get(chunk.seq_id), end_of(chunk)
            assert running is not None, f"sequence {chunk.seq_id} left while its step ran"
            sequence = running.sequence
            if not chunk.samples or running.is_ending or start + 1 >= sequence.token_limit:
                continue
            if start < len(sequence.tokens):
                forced.append((running, start))
            else:
                drawing.append((running, start))
                num_new_pages += start == len(running.pages) * self._page_size
        if num_new_pages > self._cache.num_available:
            return False
        costs: dict[Flow, int] = {}
        for running, start in drawing:
            is_full = start == len(running.pages) * self._page_size
            new_pages = self._kv.allocate(running, 1) if is_full else ()
            batch.put(Chunk(running.seq_id, start, (PENDING_TOKEN,), new_pages, True))
            flow = running.sequence.flow
            costs[flow] = costs.get(flow, 0) + DECODE_COST
        if self._fairness.enabled:
            self._charge(costs)
        for running, start in forced:
            if self._cache.num_available:
                self._continue_prefill(batch, running, start)
        return True

    def _decode(self, batch: Batch) -> None:
        """Give every decoding sequence its token; the budget holds them all by construction."""
        decoding, page_size, chunks = self._running.decoding, self._page_size, batch.chunks
        at = 0
        while at < len(decoding):
            running = decoding[at]
            start = running.num_computed
            new_pages: tuple[int, ...] = ()
            if start == len(running.pages) * page_size:
                if not self._has_room(running, batch):
                    break  # it gave way itself, and all after it before
                new_pages = self._kv.allocate(running, 1)
            sequence = running.sequence
            assert start == len(sequence.tokens) - 1, f"sequence {sequence.seq_id} is no decode"
            last_token = (sequence.tokens[start],)
            chunk = Chunk(sequence.seq_id, start, last_token, new_pages, True)
            chunks[sequence.seq_id] = chunk
            at += 1
        batch.budget -= len(chunks)
        if self._fairness.enabled:
            costs: dict[Flow, int] = {}
            for running in decoding:
                flow = running.sequence.flow
                costs[flow] = costs.get(flow, 0) + DECODE_COST
            self._charge(costs)

    def _prefill(self, batch: Batch) -> None:
        for running in tuple(self._running.prefilling):
            if self._running.get(running.seq_id) is running:
                self._admit_before(batch, running, may_preempt=True)
            if self._running.get(running.seq_id) is not running:
                continue  # preempted for another one in this very step
            start = running.num_computed
            end = self._chunk_end(start, len(running.sequence.tokens), batch.budget)
            if end > start and self._has_room(running, batch):
                self._continue_prefill(batch, running, start)

    def _continue_prefill(self, batch: Batch, running: Running, start: int) -> None:
        """Compute as much of the known tokens as budget and pages allow."""
        end = self._chunk_end(start, len(running.sequence.tokens), batch.budget)
        reach = (len(running.pages) + self._cache.num_available) * self._page_size
        if min(end, reach) > start:
            self._put_chunk(batch, running, start, min(end, reach))

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
        if len(self._running) >= self._config.max_running:
            victim = self._shares.for_seat(sequence, batch.started) if may_preempt else None
            if victim is None:
                return False
            self._give_way(batch, victim)
        while not self._fits(sequence):
            needed = self._kv.num_pages(len(sequence.tokens))
            victim = (
                self._shares.for_pages(sequence, needed, batch.started) if may_preempt else None
            )
            if victim is None:
                return False
            self._give_way(batch, victim)
        match = self._kv.match(sequence)
        source = self._fork_source(sequence, match)
        start = match.num_pages * self._page_size if source is None else len(sequence.tokens) - 1
        end = self._chunk_end(start, len(sequence.tokens), batch.budget)
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
        self._put_chunk(batch, running, running.num_computed, end)
        return True

    def _give_way(self, batch: Batch, victim: Running) -> None:
        batch.drop(victim.seq_id)
        self._running.preempt(victim, batch.step)
        self._counters.share_preemptions += 1

    def _fork_source(self, sequence: Sequence, match: Match) -> Running | None:
        """Return the running sequence whose last prompt page this one shares in part, if one does.

        It has computed the same prompt; what is left to this one is the last token, for its logits.
        """
        num_shared = sequence.num_prompt_tokens - 1
        if sequence.leader is None or len(sequence.tokens) - 1 > num_shared:
            return None
        if sequence.wants_prompt_logprobs:
            return None  # of all its tokens
        num_pages, rest = divmod(num_shared, self._page_size)
        source = self._running.get(sequence.leader.seq_id)
        if rest == 0 or match.num_pages < num_pages or source is None:
            return None
        return source if source.num_computed >= num_shared else None

    def _charge(self, costs: dict[Flow, int]) -> None:
        for flow, cost in costs.items():
            self._fairness.charge(flow, cost)
            self._waiting.charged(flow)

    def _put_chunk(self, batch: Batch, running: Running, start: int, end: int) -> None:
        tokens = running.sequence.tokens
        num_new = self._kv.num_pages(end) - len(running.pages)
        new_pages = self._kv.allocate(running, num_new)
        samples = end == len(tokens)
        targets = _targets(running, start, end)
        token_ids = tuple(tokens[start:end])
        batch.put(Chunk(running.seq_id, start, token_ids, new_pages, samples, targets))
        self._charge({running.sequence.flow: (end - start) * PREFILL_COST})

    def _chunk_end(self, start: int, num_tokens: int, budget: int) -> int:
        """Return where a chunk from `start` ends: at a page boundary unless it is the last."""
        end = min(num_tokens, start + min(budget, self._config.max_chunk))
        return end if end == num_tokens else max(start, end - end % self._page_size)

    def _num_reserved(self) -> int:
        """Return the pages that running sequences will soon need.

        Each keeps room for its known tokens and one page more, or an admission would only make the
        next step preempt it.
        """
        return len(self._running) + sum(
            self._kv.num_pages(len(running.sequence.tokens)) - len(running.pages)
            for running in self._running.prefilling
        )

    def _fits(self, sequence: Sequence) -> bool:
        """Tell whether all known tokens fit beside what the running ones will soon need."""
        num_pages, num_reserved = self._kv.num_pages(len(sequence.tokens)), self._num_reserved()
        # A long prompt that waits for pages, and could not fit whatever a match finds, is not
        # matched at every step.
        if num_pages + num_reserved > self._cache.num_available + self._cache.num_locked:
            return False
        match = self._kv.match(sequence)
        available = self._cache.num_available - match.num_unlocked
        return num_pages - len(match.pages) + num_reserved <= available

    def _has_room(self, running: Running, batch: Batch) -> bool:
        """Make sure that a page can be had, preempting the hindmost until it can.

        False if `running` must go without: a decode then gives way itself. A prefill keeps what it
        holds, unless it is alone: then its own duplicates are in its way, and a match has none.
        """
        while self._cache.num_available == 0:
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


def _targets(running: Running, start: int, end: int) -> tuple[int, ...]:
    """Return the prompt's tokens that are to be scored by positions [start, end)."""
    sequence = running.sequence
    if not sequence.wants_prompt_logprobs:
        return ()
    first, stop = max(start, running.score_from), min(end, sequence.num_prompt_tokens - 1)
    return tuple(sequence.tokens[first + 1 : stop + 1])


def end_of(chunk: Chunk) -> int:
    """Return the first position behind a chunk."""
    return chunk.start + len(chunk.token_ids)


def start_of(running: Running) -> SequenceStart:
    """Return what the ranks are told of a sequence that enters the running set."""
    sequence, num_cached = running.sequence, running.num_computed
    sampling = sequence.request.sampling
    return SequenceStart(
        seq_id=sequence.seq_id,
        slot=running.slot,
        sampling=sampling,
        num_prompt_tokens=sequence.num_prompt_tokens,
        pages=tuple(running.pages),
        num_cached_tokens=num_cached,
        history=tuple(sequence.tokens[:num_cached]) if sampling.needs_history else (),
    )
