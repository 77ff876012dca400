"""What one step computes: decodes first, then running prefills, then new admissions.

Owns the token budget and the page budget of a step, and who gives way when pages run out: unlocked
cached pages in LRU order, then the sequence of the lowest priority that arrived last. The foremost
running sequence always gets what it needs, so something always ends. Knows nothing of the line for
slots.
"""

from cluster.scheduler.batch import Batch, end_of, start_of
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.fairness import DECODE_COST, PREFILL_COST, Fairness, Flow
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Match
from cluster.scheduler.kv_cache_manager import KVCacheManager
from cluster.scheduler.preemption import Preemption
from cluster.scheduler.request_queue import RequestQueue
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Running, Sequence
from worker.protocol import DRAWN, Chunk


class StepPlanner:
    """Fills batches; counts what prompts found in the cache."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        holdings: KVCacheManager,
        running: RunningSet,
        waiting: RequestQueue,
        preemption: Preemption,
        sequences: dict[int, Sequence],
        shares: Fairness,
    ) -> None:
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.num_forks = 0
        self._config = config
        self._page_size = config.page_size
        self._cache = cache
        self._holdings = holdings
        self._running = running
        self._waiting = waiting
        self._preemption = preemption
        self._sequences = sequences
        self._shares = shares

    def plan(self, step: int) -> Batch:
        """Return the work of the next step; without chunks if there is none."""
        batch = Batch(step, self._config.token_budget)
        self._decode(batch)
        self._prefill(batch)
        self._admit(batch)
        return batch

    def plan_ahead(self, step: int, in_flight: Batch) -> Batch | None:
        """Return the work of the step after the one in flight, or None if there is none yet.

        A token that is being drawn is left for the ranks to fill in. A sequence that turns out to
        have ended with it is computed once more, for nothing. Nobody gives way to another here.
        """
        batch = Batch(step, self._config.token_budget)
        if not self._decode_ahead(batch, in_flight):
            return None
        for running in self._running.prefilling:
            chunk = in_flight.chunks.get(running.seq_id)
            if running.is_ending or (chunk is not None and chunk.samples):
                continue
            start = running.num_computed if chunk is None else end_of(chunk)
            if self._cache.num_available:
                self._continue_prefill(batch, running, start)
        self._admit(batch)
        return batch if batch.chunks else None

    def _decode_ahead(self, batch: Batch, in_flight: Batch) -> bool:
        """Go on with everyone who draws a token now; False, and nothing, if there is no room."""
        drawing: list[tuple[Running, int]] = []
        num_new_pages = 0
        for chunk in in_flight.chunks.values():
            running, start = self._running.get(chunk.seq_id), end_of(chunk)
            assert running is not None, f"sequence {chunk.seq_id} left while its step ran"
            if chunk.samples and not running.is_ending and start + 1 < running.sequence.token_limit:
                drawing.append((running, start))
                num_new_pages += start == len(running.pages) * self._page_size
        if num_new_pages > self._cache.num_available:
            return False
        costs: dict[Flow, int] = {}
        for running, start in drawing:
            is_full = start == len(running.pages) * self._page_size
            new_pages = self._holdings.grow(running, 1) if is_full else ()
            batch.put(Chunk(running.seq_id, start, (DRAWN,), new_pages, True))
            flow = running.sequence.flow
            costs[flow] = costs.get(flow, 0) + DECODE_COST
        if self._shares.enabled:
            self._charge(costs)
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
                new_pages = self._holdings.grow(running, 1)
            sequence = running.sequence
            last_token = (sequence.tokens[start],)
            chunk = Chunk(sequence.seq_id, start, last_token, new_pages, True)
            chunks[sequence.seq_id] = chunk
            at += 1
        batch.budget -= len(chunks)
        if self._shares.enabled:
            costs: dict[Flow, int] = {}
            for running in decoding:
                flow = running.sequence.flow
                costs[flow] = costs.get(flow, 0) + DECODE_COST
            self._charge(costs)

    def _prefill(self, batch: Batch) -> None:
        for running in tuple(self._running.prefilling):
            if self._running.get(running.seq_id) is not running:
                continue  # preempted for an older one in this very step
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

    def _admit(self, batch: Batch) -> None:
        while len(self._running) < self._config.max_running:
            seq_id = self._waiting.first()
            if seq_id is None:
                return
            sequence = self._sequences[seq_id]
            match = self._match(sequence)
            source = self._fork_source(sequence, match)
            start = (
                match.num_pages * self._page_size if source is None else len(sequence.tokens) - 1
            )
            end = self._chunk_end(start, len(sequence.tokens), batch.budget)
            if end == start or not self._fits(sequence, match):
                return
            self._waiting.remove(seq_id, sequence.flow)
            self._shares.admitted(sequence.flow)
            running = self._holdings.start(sequence, match, batch.step)
            if source is not None:
                self._holdings.fork(running, source, start)
                self.num_forks += 1
            self._running.enter(running)
            self._count(sequence, start)
            batch.starts.append(start_of(running))
            self._put_chunk(batch, running, running.num_computed, end)

    def _fork_source(self, sequence: Sequence, match: Match) -> Running | None:
        """Return the running sequence whose last prompt page this one shares in part, if one does.

        It has computed the same prompt; what is left to this one is the last token, for its logits.
        """
        num_shared = sequence.num_prompt_tokens - 1
        if sequence.leader is None or len(sequence.tokens) - 1 > num_shared:
            return None
        num_pages, rest = divmod(num_shared, self._page_size)
        source = self._running.get(sequence.leader.seq_id)
        if rest == 0 or match.num_pages < num_pages or source is None:
            return None
        return source if source.num_computed >= num_shared else None

    def _charge(self, costs: dict[Flow, int]) -> None:
        for flow, cost in costs.items():
            self._shares.charge(flow, cost)
            self._waiting.charged(flow)

    def _put_chunk(self, batch: Batch, running: Running, start: int, end: int) -> None:
        tokens = running.sequence.tokens
        num_new = self._num_pages(end) - len(running.pages)
        new_pages = self._holdings.grow(running, num_new)
        samples = end == len(tokens)
        batch.put(Chunk(running.seq_id, start, tuple(tokens[start:end]), new_pages, samples))
        self._charge({running.sequence.flow: (end - start) * PREFILL_COST})

    def _chunk_end(self, start: int, num_tokens: int, budget: int) -> int:
        """Return where a chunk from `start` ends: at a page boundary unless it is the last."""
        end = min(num_tokens, start + min(budget, self._config.max_chunk))
        return end if end == num_tokens else max(start, end - end % self._page_size)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _match(self, sequence: Sequence) -> Match:
        """Return the cached prefix, short of the last token: its logits must be computed."""
        num_pages = (len(sequence.tokens) - 1) // self._page_size
        if not self._config.prefix_cache:
            num_pages = 0
        return self._cache.match(sequence.namespace, sequence.keys(num_pages))

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Tell whether all known tokens fit beside what the running ones will soon need.

        Each running sequence keeps room for its known tokens and one page more, or an admission
        would only make the next step preempt it.
        """
        available = self._cache.num_available - match.num_unlocked
        needed = self._num_pages(len(sequence.tokens)) - len(match.pages)
        reserved = len(self._running) + sum(
            self._num_pages(len(other.sequence.tokens)) - len(other.pages)
            for other in self._running.prefilling
        )
        return needed + reserved <= available

    def _has_room(self, running: Running, batch: Batch) -> bool:
        """Make sure that a page can be had, preempting the hindmost until it can.

        False if `running` must go without: a decode then gives way itself. A prefill keeps what it
        holds, unless it is alone: then its own duplicates are in its way, and a match has none.
        """
        while self._cache.num_available == 0:
            victim = self._running.hindmost()
            if victim is running and not running.is_decoding and len(self._running) > 1:
                return False
            batch.drop(victim.seq_id)
            self._preemption.preempt(victim, batch.step)
            if victim is running:
                return False
        return True

    def _count(self, sequence: Sequence, num_cached_tokens: int) -> None:
        if sequence.num_cached_tokens is None:  # a return after a preemption does not count
            sequence.num_cached_tokens = num_cached_tokens
            self.prompt_tokens += sequence.num_prompt_tokens
            self.cached_prompt_tokens += num_cached_tokens
