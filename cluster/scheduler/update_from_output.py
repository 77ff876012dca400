"""What a step came to: tokens appended, full pages cached, sequences ended.

vLLM's `Scheduler.update_from_output`. Owns the end of every running sequence, whether by its last
token, an abort or a failure. One that a later step in flight computes ends with that step: until
then its pages are written.
"""

from cluster.errors import ErrorInfo
from cluster.request import BASE, FinishReason, TokenEvent
from cluster.scheduler.batch import Batch, end_of
from cluster.scheduler.paging.kv_cache_manager import KVCacheManager
from cluster.scheduler.parallel_sampling import ParallelSamplingGroups
from cluster.scheduler.request_queue import Fairness
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Running, Sequence
from cluster.scheduler.stats import SchedulerCounters
from worker.protocol import Chunk, PooledPrompt, SampledToken, StepOutput, TokenLogprobs

EXPIRED = ErrorInfo("DeadlineExceeded", "the request has taken longer than it may")
UNLOADED = ErrorInfo("NotFound", "the adapter has been unloaded", param="model")


class OutputUpdater:
    """Applies the outputs of steps; counts tokens."""

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        groups: ParallelSamplingGroups,
        sequences: dict[int, Sequence],
        fairness: Fairness,
        counters: SchedulerCounters,
    ) -> None:
        self._kv = kv
        self._running = running
        self._groups = groups
        self._sequences = sequences
        self._fairness = fairness
        self._counters = counters
        self._windows = kv.windows
        self._has_states = kv.states is not None
        self._ending: list[Running] = []

    def end_at_commit(self, running: Running) -> None:
        """End a sequence when the steps in flight that have it are committed."""
        if not running.is_ending:
            running.is_ending = True
            self._ending.append(running)

    def finish(self, running: Running, step: int) -> None:
        """End a sequence now; its full pages stay in the cache, unless it has failed."""
        self._running.finish(running, step)
        self._groups.release(running.seq_id)
        self._fairness.leave(running.sequence.flow)
        del self._sequences[running.seq_id]

    def commit(
        self, batch: Batch, output: StepOutput, following: Batch | None
    ) -> list[tuple[int, TokenEvent]]:
        """Apply what the ranks computed; return (seq_id, event) in plan order.

        `following` is the step that the ranks are computing meanwhile, if there is one.
        """
        tokens, pooled = iter(output.tokens), iter(output.pooled)
        failed = output.failed and frozenset(output.failed)
        grammar_errors = dict(output.grammar_errors)
        scored = {one.seq_id: one.of_targets for one in output.prompt_logprobs}
        events: list[tuple[int, TokenEvent]] = []
        running_by_id = self._running.by_id
        for chunk in batch.chunks.values():
            running = running_by_id.get(chunk.seq_id)
            assert running is not None, f"sequence {chunk.seq_id} left while its step ran"
            is_failed = chunk.seq_id in failed
            sampled: SampledToken | PooledPrompt | None = None
            if chunk.samples and not is_failed:
                is_pooled = running.sequence.request.sampling.pooling
                sampled = next(pooled) if is_pooled else next(tokens)
            assert sampled is None or sampled.seq_id == chunk.seq_id, "tokens are out of order"
            # What was drawn for one that has ended already is no token of it.
            num_known = len(running.sequence.tokens)
            end = end_of(chunk)
            running.num_computed = min(end, num_known)
            if self._has_states:
                running.state_at = end
            running.is_failed |= is_failed
            if chunk.targets and not is_failed:
                _take_scores(running.sequence, chunk, scored[chunk.seq_id])
            if running.is_ending:
                continue
            event = self._advance(running, sampled, batch.step, grammar_errors)
            if event is not None:
                events.append((chunk.seq_id, event))
                if event.finish_reason is not None:
                    self._end(running, batch.step, following)
                    continue
                if running.is_decoding and len(event.token_ids) == 1:
                    continue
                self._groups.release(running.seq_id)
            if following is None or chunk.seq_id not in following.chunks:
                self._regroup(running)
            elif chunk.samples and not running.is_decoding:
                self._running.begin_decoding(running)
        assert next(tokens, None) is None, "rank 0 sent more tokens than the plan samples"
        assert next(pooled, None) is None, "rank 0 has pooled more than the plan does"
        self._running.committed()
        if self._ending:
            ending, self._ending = self._ending, []
            for running in ending:
                self._end(running, batch.step, following)
        return events

    def _advance(
        self,
        running: Running,
        sampled: SampledToken | PooledPrompt | None,
        step: int,
        grammar_errors: dict[int, str],
    ) -> TokenEvent | None:
        """Apply one computed chunk to its sequence."""
        sequence = running.sequence
        if running.is_failed:
            reason = grammar_errors.get(running.seq_id)
            error = not_finite(running.adapter) if reason is None else no_way_on(reason)
            return failure(sequence, error)
        # One that computes what the cache may have already would hold both until its prompt is
        # whole, and start anew for ever where there is no room for both.
        is_part = running.num_computed < sequence.num_prompt_tokens
        if not running.is_decoding and not (is_part and sequence.computes_whole_prompt):
            self._kv.cache_full_pages(running, step)
        if self._windows is not None:
            self._windows.move_on(running)
        if sampled is None:
            return None
        if isinstance(sampled, PooledPrompt):
            return pooled_event(sequence, sampled)
        if running.num_computed < len(sequence.tokens):  # drawn by a plan made ahead, but forced
            expected = sequence.tokens[running.num_computed]
            assert sampled.token_id == expected, f"{sampled} where {expected} was forced"
            return None
        return self._take(sequence, sampled)

    def _take(self, sequence: Sequence, sampled: SampledToken) -> TokenEvent:
        event = take_token(sequence, sampled)
        self._counters.generated_tokens += len(event.token_ids)
        self._counters.forced_tokens += len(event.token_ids) - 1
        return event

    def _regroup(self, running: Running) -> None:
        """Let a sequence decode if all its tokens but the last are computed, else prefill."""
        is_decode = running.num_computed == len(running.sequence.tokens) - 1
        if is_decode and not running.is_decoding:
            self._running.begin_decoding(running)
        elif not is_decode and running.is_decoding:
            self._running.begin_prefill(running)

    def _end(self, running: Running, step: int, following: Batch | None) -> None:
        """End a sequence now, or with the following step if that computes it once more."""
        if following is None or running.seq_id not in following.chunks:
            self.finish(running, step)
        else:
            running.is_ending = True
            self._ending.append(running)


def _take_scores(sequence: Sequence, chunk: Chunk, scores: tuple[TokenLogprobs, ...]) -> None:
    assert len(scores) == len(chunk.targets), f"rank 0 scored {len(scores)} targets of {chunk}"
    sequence.prompt_logprobs += scores
    sequence.num_scored += len(scores)


def take_token(sequence: Sequence, sampled: SampledToken) -> TokenEvent:
    """Append a drawn token, and those that it forces, and return the event.

    It has a finish reason if one of them is the last.
    """
    request, tokens = sequence.request, sequence.tokens
    is_first = len(tokens) == len(request.token_ids)
    num_cached = (sequence.num_cached_tokens or 0) if is_first else 0
    token_ids: tuple[int, ...] = (sampled.token_id,)
    reason = _append(sequence, sampled.token_id)
    for token_id in sampled.forced:
        if reason is not None:
            break
        reason = _append(sequence, token_id)
        token_ids += (token_id,)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    if is_first and sequence.wants_prompt_logprobs:
        assert sequence.num_scored == sequence.num_prompt_tokens - 1, "a prompt is scored in part"
        prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
    if request.sampling.num_logprobs is None:
        return TokenEvent(
            request.request_id, token_ids, (), (), num_cached, reason, None, prompt_logprobs
        )
    logprob = sampled.logprob
    assert logprob is not None, f"rank 0 sent no log-probability for sequence {sequence.seq_id}"
    return TokenEvent(
        request.request_id,
        token_ids,
        (logprob,),
        (sampled.top_logprobs,),
        num_cached,
        reason,
        None,
        prompt_logprobs,
    )


def _append(sequence: Sequence, token_id: int) -> FinishReason | None:
    sequence.tokens.append(token_id)
    if token_id in sequence.stop_token_ids:
        return "stop"
    return "length" if len(sequence.tokens) >= sequence.token_limit else None


def pooled_event(sequence: Sequence, pooled: PooledPrompt) -> TokenEvent:
    """Return the event that ends a sequence whose prompt has been pooled."""
    return TokenEvent(
        sequence.request.request_id,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        finish_reason="stop",
        pooled=pooled.values,
    )


def failure(sequence: Sequence, error: ErrorInfo) -> TokenEvent:
    """Return the event that ends a sequence with an error."""
    return TokenEvent(sequence.request.request_id, finish_reason="error", error=error)


def not_finite(adapter: str) -> ErrorInfo:
    """Return what a sequence ends with whose logits are no numbers."""
    model = "the base model" if adapter == BASE else f"the model with adapter {adapter}"
    return ErrorInfo("Internal", f"{model} produced non-finite logits")


def no_way_on(reason: str) -> ErrorInfo:
    """Return what a sequence ends with whose grammar can be followed no further."""
    message = f"the grammar of the answer can be followed no further: {reason}"
    return ErrorInfo("InvalidRequest", message, param="response_format")
