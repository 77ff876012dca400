"""How many bytes of weights a pool has in memory at a time while it reads adapters.

Threads wait for it in order of arrival; one adapter that is larger than all of it is read alone.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition


class ReadRoom:
    """Bytes of weights between the disk and the shards that are made of them."""

    def __init__(self, size: int) -> None:
        self.size = size  # bytes
        self.num_held = 0  # bytes
        self.most_held = 0  # bytes, since the start
        self._waiting: deque[object] = deque()  # a ticket of each thread, the first to come first
        self._changed = Condition()

    @contextmanager
    def entered(self) -> Iterator[Callable[[int], None]]:
        """Hold what is asked for within the block, by calling what it gives with a size in bytes.

        That returns when there is room.
        """
        held: list[int] = []

        def take(num_bytes: int) -> None:
            assert not held, "one adapter at a time"
            self._take(num_bytes)
            held.append(num_bytes)

        try:
            yield take
        finally:
            with self._changed:
                self.num_held -= sum(held)
                self._changed.notify_all()

    def _take(self, num_bytes: int) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and self._fits(num_bytes))
            self._waiting.popleft()
            self.num_held += num_bytes
            self.most_held = max(self.most_held, self.num_held)
            self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        return not self.num_held or self.num_held + num_bytes <= self.size
