"""A request at the door: refused if it could never be served, else a sequence that waits."""

from cluster.errors import InvalidRequest
from cluster.request import BASE, Request
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.fairness import Flow
from cluster.scheduler.kv_cache.namespace import namespace
from cluster.scheduler.sequence import Sequence, Status


def refuse_impossible(config: SchedulerConfig, request: Request) -> None:
    """Check a request against the limits that no waiting can change.

    Raises:
        InvalidRequest: naming the limit.
    """
    num_tokens = len(request.token_ids)
    if num_tokens == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if request.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if num_tokens + 1 > config.token_limit:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens, but prompt and output together may have "
            f"{config.token_limit}",
            param="prompt",
            code="context_length_exceeded",
        )
    if request.adapter != BASE and config.num_slots == 0:
        raise InvalidRequest("this server has no adapter slots", param="model")
    if request.weight < 1:
        raise InvalidRequest(f"weight must be at least 1, not {request.weight}")


def refuse_strangers(requests: tuple[Request, ...]) -> None:
    """Check that requests that come together are choices of one prompt.

    Raises:
        InvalidRequest: if they are none, or differ in what they would share.
    """
    if len(requests) == 1:
        return  # nothing to compare, and a long prompt takes its time to hash
    if not requests:
        raise InvalidRequest("there is no request")
    shared = {(r.adapter, r.cache_salt, r.token_ids, r.tenant, r.priority) for r in requests}
    if len(shared) > 1:
        raise InvalidRequest("choices must have the same prompt, adapter, salt and priority")


def new_sequence(
    config: SchedulerConfig,
    request: Request,
    seq_id: int,
    flow: Flow,
    leader: Sequence | None,
) -> Sequence:
    """Return the sequence of a request: it waits, or is held while `leader` computes its prompt."""
    longest = len(request.token_ids) + request.max_tokens
    return Sequence(
        seq_id=seq_id,
        order=(request.priority, seq_id),
        request=request,
        flow=flow,
        leader=leader,
        status=Status.WAITING if leader is None else Status.HELD,
        namespace=namespace(config.base_digest, request.adapter, request.cache_salt),
        page_size=config.page_size,
        token_limit=min(longest, config.token_limit),
        tokens=list(request.token_ids),
        stop_token_ids=frozenset(request.stop_token_ids),
    )
