"""What a step came to: tokens appended, pages handed to the cache, sequences ended.

Owns the end of every running sequence, whether by its last token, an abort or a failure. One that
a later step in flight computes ends with that step: until then its pages are written. Knows nothing
of waiting sequences.
"""

from cluster.request import TokenEvent
from cluster.scheduler.batch import Batch
from cluster.scheduler.fairness import Fairness
from cluster.scheduler.kv_cache_manager import KVCacheManager
from cluster.scheduler.outcome import NOT_FINITE, failure, take_token
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Running, Sequence
from worker.protocol import SampledToken, StepOutput


class OutputUpdater:
    """Applies the outputs of steps; counts tokens."""

    def __init__(
        self,
        holdings: KVCacheManager,
        running: RunningSet,
        sequences: dict[int, Sequence],
        shares: Fairness,
    ) -> None:
        self.generated_tokens = 0
        self._holdings = holdings
        self._running = running
        self._sequences = sequences
        self._shares = shares
        self._ending: list[Running] = []

    def end_at_commit(self, running: Running) -> None:
        """End a sequence when the steps in flight that have it are committed."""
        if not running.is_ending:
            running.is_ending = True
            self._ending.append(running)

    def finish(self, running: Running, step: int) -> None:
        """End a sequence now; its full pages stay in the cache, unless it has failed."""
        self._running.leave(running)
        self._shares.leave(running.sequence.flow)
        del self._sequences[running.seq_id]
        if running.is_failed:
            self._holdings.discard(running, step)
        else:
            self._holdings.finish(running, step)

    def commit(
        self, batch: Batch, output: StepOutput, following: Batch | None
    ) -> list[tuple[int, TokenEvent]]:
        """Apply what the ranks computed; return (seq_id, event) in plan order.

        `following` is the step that the ranks are computing meanwhile, if there is one.
        """
        tokens, failed = iter(output.tokens), frozenset(output.failed)
        events: list[tuple[int, TokenEvent]] = []
        for chunk in batch.chunks.values():
            running = self._running.get(chunk.seq_id)
            assert running is not None, f"sequence {chunk.seq_id} left while its step ran"
            is_failed = chunk.seq_id in failed
            sampled = next(tokens) if chunk.samples and not is_failed else None
            assert sampled is None or sampled.seq_id == chunk.seq_id, "tokens are out of order"
            # What was drawn for one that has ended already is no token of it.
            num_known = len(running.sequence.tokens)
            running.num_computed = min(chunk.start + len(chunk.token_ids), num_known)
            running.is_failed |= is_failed
            if running.is_ending:
                continue
            event = self._advance(running, sampled, batch.step)
            if event is None:
                continue
            events.append((chunk.seq_id, event))
            if event.finish_reason is not None:
                self._end(running, batch.step, following)
            elif not running.is_decoding:
                self._running.begin_decoding(running)
        assert next(tokens, None) is None, "rank 0 sent more tokens than the plan samples"
        self._running.committed()
        ending, self._ending = self._ending, []
        for running in ending:
            self._end(running, batch.step, following)
        return events

    def _advance(
        self, running: Running, sampled: SampledToken | None, step: int
    ) -> TokenEvent | None:
        """Apply one computed chunk to its sequence."""
        if running.is_failed:
            return failure(running.sequence, NOT_FINITE)
        if not running.is_decoding:
            self._holdings.keep(running, step)
        if sampled is None:
            return None
        self.generated_tokens += 1
        return take_token(running.sequence, sampled)

    def _end(self, running: Running, step: int, following: Batch | None) -> None:
        """End a sequence now, or with the following step if that computes it once more."""
        if following is None or running.seq_id not in following.chunks:
            self.finish(running, step)
        else:
            running.is_ending = True
            self._ending.append(running)
