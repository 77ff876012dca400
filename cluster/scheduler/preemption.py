"""Taking a running sequence's pages, lock and lease back, so that it resumes later by a match."""

from cluster.scheduler.kv_cache_manager import KVCacheManager
from cluster.scheduler.request_queue import RequestQueue
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Running


class Preemption:
    """Running to waiting, at its arrival place, with all its tokens."""

    def __init__(
        self, holdings: KVCacheManager, running: RunningSet, waiting: RequestQueue
    ) -> None:
        self.count = 0  # in the life of the scheduler
        self._holdings = holdings
        self._running = running
        self._waiting = waiting

    def preempt(self, running: Running, step: int) -> None:
        """Send one sequence back; no step that writes its pages may be in flight."""
        self._holdings.preempt(running, step)
        self._running.leave(running)
        self._waiting.push(running.seq_id, running.sequence.flow)
        self.count += 1
