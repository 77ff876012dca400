"""Where sequences are before they run: held while another one computes their prompt, or waiting.

Owns the arrival numbers and what is refused at the door. Knows nothing of pages or steps in flight.
"""

from cluster.errors import Conflict, InvalidRequest, NotFound, Overloaded
from cluster.request import BASE, Request
from cluster.scheduler.adapter_unloads import Unloads
from cluster.scheduler.arrival import new_sequence, refuse_impossible, refuse_strangers
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.fairness import Fairness
from cluster.scheduler.lora_slot_policy import SlotPolicy
from cluster.scheduler.lora_slot_queue import SlotQueue
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.parallel_sampling import ParallelSamplingGroups
from cluster.scheduler.request_queue import RequestQueue
from cluster.scheduler.sequence import Sequence, Status

RETRY_AFTER_SECONDS = 1  # a full queue drains within steps


class Admission:
    """Takes requests in; lets sequences out again when they end before they have run."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: RequestQueue,
        shares: Fairness,
        slots: SlotTable,
        line: SlotQueue,
        turns: SlotPolicy,
        unloads: Unloads,
        sequences: dict[int, Sequence],
    ) -> None:
        self.last_seq_id = 0
        self.forks = ParallelSamplingGroups()
        self._config = config
        self._waiting = waiting
        self._shares = shares
        self._slots = slots
        self._line = line
        self._turns = turns
        self._unloads = unloads
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._waiting) + len(self.forks)

    def add_all(self, requests: tuple[Request, ...], step: int) -> list[int]:
        """Queue the choices of one prompt, all or none; see `Scheduler.add_all`."""
        refuse_strangers(requests)
        for request in requests:
            refuse_impossible(self._config, request)
        adapter, num_bytes = requests[0].adapter, requests[0].adapter_bytes
        if self._unloads.is_fenced(adapter):
            raise NotFound(f"adapter {adapter} is being unloaded", param="model")
        self._refuse_giant(adapter, num_bytes)
        self._refuse_overload(len(requests))
        leader = self._enter(requests[0], None)
        followers = [self._enter(request, leader) for request in requests[1:]]
        self.forks.hold(leader, followers)
        self._wait(leader, step)
        self._turns.hand_out(step)
        return [sequence.seq_id for sequence in (leader, *followers)]

    def release(self, step: int) -> None:
        """Let sequences wait that need not be held any more."""
        for sequence in self.forks.take_free():
            self._wait(sequence, step)

    def drop(self, seq_id: int, step: int) -> Sequence:
        """End a sequence that waits or is held."""
        sequence = self._sequences.pop(seq_id)
        if sequence.status is Status.HELD:
            self.forks.drop(sequence)
        else:
            self._waiting.remove(seq_id, sequence.flow)
            self._line.note(sequence.request.adapter, step)
        sequence.status = Status.FINISHED
        self._shares.leave(sequence.flow)
        return sequence

    def drop_adapter(self, adapter: str, step: int) -> list[Sequence]:
        """End all sequences of an adapter that wait or are held."""
        held = [sequence.seq_id for sequence in self.forks.of_adapter(adapter)]
        return [self.drop(seq_id, step) for seq_id in (*held, *self._waiting.lane(adapter))]

    def _refuse_giant(self, adapter: str, num_bytes: int) -> None:
        if adapter != BASE and not self._slots.fits_pinned(adapter, num_bytes):
            raise Conflict(
                f"the adapter claims {num_bytes} bytes on each rank, and of {self._slots.memory} "
                f"bytes for adapters {self._slots.pinned_bytes} are pinned",
                "model",
            )

    def _refuse_overload(self, num_requests: int) -> None:
        limit = self._config.max_waiting
        if num_requests > limit:
            raise InvalidRequest(f"{num_requests} choices are more than may ever wait, {limit}")
        if len(self) + num_requests > limit:
            raise Overloaded(
                f"{len(self)} requests are waiting already, of {limit} that may; "
                f"{num_requests} more are too many",
                retry_after=RETRY_AFTER_SECONDS,
            )

    def _enter(self, request: Request, leader: Sequence | None) -> Sequence:
        self.last_seq_id += 1
        flow = self._shares.enter(request.tenant, request.adapter, request.priority, request.weight)
        sequence = new_sequence(self._config, request, self.last_seq_id, flow, leader)
        self._sequences[sequence.seq_id] = sequence
        return sequence

    def _wait(self, sequence: Sequence, step: int) -> None:
        sequence.status = Status.WAITING
        self._waiting.push(sequence.seq_id, sequence.flow)
        if sequence.request.adapter != BASE:
            self._line.expect(sequence.request.adapter, sequence.request.adapter_bytes)
        self._line.note(sequence.request.adapter, step)
