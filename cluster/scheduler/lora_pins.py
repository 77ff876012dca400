"""Which adapters may be pinned: a slot, and memory enough for any of them, is left to the others.

Knows nothing of who waits for a slot, nor of who asked for the pin.
"""

from cluster.errors import Conflict
from cluster.scheduler.lora_slot_policy import SlotPolicy
from cluster.scheduler.lora_slot_queue import SlotQueue
from cluster.scheduler.lora_slots import SlotTable


class Pins:
    """The door to the pins of the slot table."""

    def __init__(self, slots: SlotTable, line: SlotQueue, turns: SlotPolicy) -> None:
        self._slots = slots
        self._line = line
        self._turns = turns

    def pin(self, digest: str, num_bytes: int, step: int) -> None:
        """Keep an adapter in its slot; see `Scheduler.pin`."""
        slots = self._slots
        if slots.is_pinned(digest):
            return
        if slots.num_pinned + 1 >= slots.num_slots:
            raise Conflict(
                f"{slots.num_pinned} of {slots.num_slots} adapter slots are pinned; "
                "one must stay free for the other adapters"
            )
        others = self._line.largest_besides(digest)
        if slots.memory and slots.pinned_bytes + num_bytes + others > slots.memory:
            raise Conflict(
                f"{slots.pinned_bytes} of {slots.memory} bytes for adapters are pinned; "
                f"{num_bytes} more would leave too little for the other adapters"
            )
        self._turns.pin(digest, num_bytes, step)

    def unpin(self, digest: str) -> None:
        """Let an adapter be evicted again when it is idle."""
        self._slots.unpin(digest)
