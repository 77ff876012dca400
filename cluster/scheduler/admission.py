"""Admission of requests: refused if they could never be served, else sequences that wait.

Owns the arrival numbers and what is refused at the door: impossible lengths, adapters that are
being unloaded or claim too much, and more than may wait.
"""

from cluster.errors import Conflict, InvalidRequest, NotFound, Overloaded
from cluster.request import BASE, Request
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.radix_tree import namespace
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.parallel_sampling import ParallelSamplingGroups
from cluster.scheduler.policy.adapter_unloads import Unloads
from cluster.scheduler.policy.lora_slot_policy import SlotPolicy
from cluster.scheduler.policy.lora_slot_queue import SlotQueue
from cluster.scheduler.request_queue import Fairness, Flow, RequestQueue
from cluster.scheduler.sequence import Sequence, Status
from cluster.tenancy.shared_room import NOBODY, most_of

RETRY_AFTER_SECONDS = 1  # a full queue drains within steps


class Admission:
    """Takes requests in; drops sequences that end before they have run."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: RequestQueue,
        groups: ParallelSamplingGroups,
        fairness: Fairness,
        slots: SlotTable,
        slot_queue: SlotQueue,
        slot_policy: SlotPolicy,
        unloads: Unloads,
        sequences: dict[int, Sequence],
    ) -> None:
        self.last_seq_id = 0
        self._config = config
        self._waiting = waiting
        self._groups = groups
        self._fairness = fairness
        self._slots = slots
        self._slot_queue = slot_queue
        self._slot_policy = slot_policy
        self._unloads = unloads
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._waiting) + len(self._groups)

    def add_all(
        self, requests: tuple[Request, ...], step: int, *, resumes: bool = False
    ) -> list[int]:
        """Queue the choices of one prompt, all or none; see `Scheduler.add_all`."""
        refuse_unlike(requests)
        for request in requests:
            refuse_impossible(self._config, request)
        adapter, num_bytes = requests[0].adapter, requests[0].adapter_bytes
        if self._unloads.is_fenced(adapter):
            raise NotFound(f"adapter {adapter} is being unloaded", param="model")
        self._refuse_oversized(adapter, num_bytes)
        if not resumes:
            self._refuse_overload(requests[0], len(requests))
        leader = self._enter(requests[0], None)
        followers = [self._enter(request, leader) for request in requests[1:]]
        self._groups.hold(leader, followers)
        self._wait(leader, step)
        self._slot_policy.assign(step)
        return [sequence.seq_id for sequence in (leader, *followers)]

    def release(self, step: int) -> None:
        """Let sequences wait that need not be held any more."""
        for sequence in self._groups.take_released():
            self._wait(sequence, step)

    def drop(self, seq_id: int, step: int) -> Sequence:
        """End a sequence that waits or is held."""
        sequence = self._sequences.pop(seq_id)
        if sequence.status is Status.HELD:
            self._groups.drop(sequence)
        else:
            self._waiting.remove(seq_id, sequence.flow)
            self._slot_queue.update(sequence.request.adapter, step)
        sequence.status = Status.FINISHED
        self._groups.release(seq_id)
        self._fairness.leave(sequence.flow)
        return sequence

    def drop_adapter(self, adapter: str, step: int) -> list[Sequence]:
        """End all sequences of an adapter that wait or are held."""
        held = [sequence.seq_id for sequence in self._groups.of_adapter(adapter)]
        return [self.drop(seq_id, step) for seq_id in (*held, *self._waiting.lane(adapter))]

    def _refuse_oversized(self, adapter: str, num_bytes: int) -> None:
        if adapter != BASE and not self._slots.fits_pinned(adapter, num_bytes):
            raise Conflict(
                f"the adapter claims {num_bytes} bytes on each rank, and of {self._slots.memory} "
                f"bytes for adapters {self._slots.pinned_bytes} are pinned",
                "model",
            )

    def _refuse_overload(self, request: Request, num_requests: int) -> None:
        room = self._waiting.room
        # Without fairness: first come, first served.
        tenant = request.tenant if self._fairness.enabled else NOBODY
        most = most_of(tenant, room.size)
        if num_requests > most:
            raise InvalidRequest(f"{num_requests} choices are more than may ever wait, {most}")
        if not room.has_room(num_requests):
            raise Overloaded(
                f"of {room.size} requests that may wait nearly all do: {num_requests} more is too "
                "much",
                retry_after=RETRY_AFTER_SECONDS,
            )
        if not room.may_take(tenant, num_requests, request.weight):
            raise Overloaded(
                f"{room.held_by(tenant)} requests of this tenant are waiting already; "
                f"{num_requests} more would leave too few places for others, of {room.size}",
                retry_after=RETRY_AFTER_SECONDS,
            )

    def _enter(self, request: Request, leader: Sequence | None) -> Sequence:
        self.last_seq_id += 1
        flow = self._fairness.enter(
            request.tenant, request.adapter, request.priority, request.weight
        )
        sequence = _new_sequence(self._config, request, self.last_seq_id, flow, leader)
        self._sequences[sequence.seq_id] = sequence
        return sequence

    def _wait(self, sequence: Sequence, step: int) -> None:
        sequence.status = Status.WAITING
        self._waiting.push(sequence.seq_id, sequence.flow)
        if sequence.request.adapter != BASE:
            self._slot_queue.expect(sequence.request.adapter, sequence.request.adapter_bytes)
        self._slot_queue.update(sequence.request.adapter, step)


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
    if num_tokens + (not request.sampling.pooling) > config.token_limit:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens, but prompt and output together may have "
            f"{config.token_limit}",
            param="prompt",
            code="context_length_exceeded",
        )
    if request.sampling.pooling and (request.max_tokens != 1 or request.sampling.grammar):
        raise InvalidRequest("a prompt that is pooled has no output", param="max_tokens")
    if request.sampling.pooling and request.sampling.prompt_logprobs is not None:
        raise InvalidRequest("a prompt is pooled or scored", param="prompt_logprobs")
    num_drawn = len(request.output_token_ids)
    if num_drawn and num_drawn >= min(request.max_tokens, config.token_limit - num_tokens):
        raise InvalidRequest(f"nothing is left to generate behind {num_drawn} output tokens")
    if request.adapter != BASE and config.num_slots == 0:
        raise InvalidRequest("this server has no adapter slots", param="model")
    if request.weight < 1:
        raise InvalidRequest(f"weight must be at least 1, not {request.weight}")


def refuse_unlike(requests: tuple[Request, ...]) -> None:
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


def _new_sequence(
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
        tokens=[*request.token_ids, *request.output_token_ids],
        stop_token_ids=frozenset(request.stop_token_ids),
        num_cached_tokens=0 if request.output_token_ids else None,  # the client knows already
    )
