"""What a drawn token means for a sequence, and the news of it for the client."""

from cluster.request import ErrorInfo, FinishReason, TokenEvent
from cluster.scheduler.sequence import Sequence
from worker.protocol import SampledToken

EXPIRED = ErrorInfo("DeadlineExceeded", "the request has taken longer than it may")
UNLOADED = ErrorInfo("NotFound", "the adapter has been unloaded", param="model")
NOT_FINITE = ErrorInfo("Internal", "the model produced non-finite logits")


def take_token(sequence: Sequence, sampled: SampledToken) -> TokenEvent:
    """Append a drawn token and return the event, with a finish reason if it is the last."""
    token_id, request, tokens = sampled.token_id, sequence.request, sequence.tokens
    tokens.append(token_id)
    reason: FinishReason | None = None
    if token_id in sequence.stop_token_ids:
        reason = "stop"
    elif len(tokens) >= sequence.token_limit:
        reason = "length"
    num_cached = 0
    if len(tokens) == len(request.token_ids) + 1:
        num_cached = sequence.num_cached_tokens or 0
    if request.sampling.num_logprobs is None:
        return TokenEvent(request.request_id, (token_id,), (), (), num_cached, reason)
    logprob = sampled.logprob
    assert logprob is not None, f"rank 0 sent no log-probability for sequence {sequence.seq_id}"
    return TokenEvent(
        request.request_id, (token_id,), (logprob,), (sampled.top_logprobs,), num_cached, reason
    )


def failure(sequence: Sequence, error: ErrorInfo) -> TokenEvent:
    """Return the event that ends a sequence with an error."""
    return TokenEvent(sequence.request.request_id, finish_reason="error", error=error)
