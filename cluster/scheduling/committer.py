"""What a step came to: tokens appended, pages handed to the cache, sequences ended.

Owns the end of every running sequence, whether by its last token, an abort or a failure. Knows
nothing of waiting sequences.
"""

from cluster.request import TokenEvent
from cluster.scheduling.fair_share import FairShare
from cluster.scheduling.holdings import Holdings
from cluster.scheduling.outcome import NOT_FINITE, failure, take_token
from cluster.scheduling.running_set import RunningSet
from cluster.scheduling.sequence import Running, Sequence, Status
from cluster.scheduling.step_planner import Batch
from worker.protocol import SampledToken, StepOutput


class Committer:
    """Applies the outputs of steps; counts tokens."""

    def __init__(
        self,
        holdings: Holdings,
        running: RunningSet,
        sequences: dict[int, Sequence],
        shares: FairShare,
    ) -> None:
        self.generated_tokens = 0
        self._holdings = holdings
        self._running = running
        self._sequences = sequences
        self._shares = shares
        self._aborted: list[Running] = []

    def abort_at_commit(self, running: Running) -> None:
        """End a sequence when the step in flight is committed: until then its pages are written."""
        if not running.is_aborted:
            running.is_aborted = True
            self._aborted.append(running)

    def finish(self, running: Running, step: int) -> None:
        """End a sequence now; its full pages stay in the cache."""
        self._drop(running)
        self._holdings.finish(running, step)

    def commit(self, batch: Batch, output: StepOutput) -> list[tuple[int, TokenEvent]]:
        """Apply what the ranks computed; return (seq_id, event) in plan order."""
        tokens, failed = iter(output.tokens), frozenset(output.failed)
        events: list[tuple[int, TokenEvent]] = []
        for chunk in batch.chunks.values():
            running = self._running.get(chunk.seq_id)
            assert running is not None, f"sequence {chunk.seq_id} left while its step ran"
            running.num_computed = chunk.start + len(chunk.token_ids)
            if chunk.seq_id in failed:
                if not running.is_aborted:
                    events.append((chunk.seq_id, failure(running.sequence, NOT_FINITE)))
                self._drop(running)
                self._holdings.discard(running, batch.step)
                continue
            event = self._advance(running, next(tokens) if chunk.samples else None, batch.step)
            if event is not None:
                events.append((chunk.seq_id, event))
        assert next(tokens, None) is None, "rank 0 sent more tokens than the plan samples"
        self._running.committed()
        self._finish_aborted(batch.step)
        return events

    def _advance(
        self, running: Running, sampled: SampledToken | None, step: int
    ) -> TokenEvent | None:
        """Apply one computed chunk to its sequence."""
        if not running.is_decoding:
            self._holdings.keep(running, step)
        if sampled is None or running.is_aborted:
            return None
        assert sampled.seq_id == running.seq_id, "tokens are not in plan order"
        self.generated_tokens += 1
        event = take_token(running.sequence, sampled)
        if event.finish_reason is not None:
            self.finish(running, step)
        elif not running.is_decoding:
            self._running.begin_decoding(running)
        return event

    def _finish_aborted(self, step: int) -> None:
        aborted, self._aborted = self._aborted, []
        for running in aborted:
            if running.sequence.status is Status.RUNNING:
                self.finish(running, step)

    def _drop(self, running: Running) -> None:
        self._running.leave(running)
        self._shares.leave(running.sequence.flow)
        del self._sequences[running.seq_id]
