"""Taking a running sequence's pages, lock and lease back, so that it resumes later by a match."""

from cluster.scheduling.holdings import Holdings
from cluster.scheduling.running_set import RunningSet
from cluster.scheduling.sequence import Running
from cluster.scheduling.waiting_queue import WaitingQueue


class Retraction:
    """Running to waiting, at its arrival place, with all its tokens."""

    def __init__(self, holdings: Holdings, running: RunningSet, waiting: WaitingQueue) -> None:
        self.count = 0  # in the life of the scheduler
        self._holdings = holdings
        self._running = running
        self._waiting = waiting

    def retract(self, running: Running, step: int) -> None:
        """Send one sequence back; no step that writes its pages may be in flight."""
        self._holdings.retract(running, step)
        self._running.leave(running)
        self._waiting.push(running.seq_id, running.sequence.flow)
        self.count += 1
