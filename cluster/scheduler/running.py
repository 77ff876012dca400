"""The running sequences by priority and arrival; those that decode apart from the others."""

from bisect import bisect_left, insort
from operator import attrgetter

from cluster.scheduler.sequence import Running

_by_order = attrgetter("sequence.order")


class RunningSet:
    """Who is running, and who has left since the last plan was made."""

    def __init__(self) -> None:
        self.decoding: list[Running] = []  # one token each step
        self.prefilling: list[Running] = []  # K/V of known tokens still missing
        self._by_id: dict[int, Running] = {}
        self._untold: list[Running] = []  # have left, and no plan has said so
        self._told: list[list[Running]] = []  # each plan in flight says so, the oldest first

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, seq_id: int) -> Running | None:
        """Return what a sequence holds, if it is running."""
        return self._by_id.get(seq_id)

    def all(self) -> list[Running]:
        """Return every running sequence in order."""
        return sorted(self._by_id.values(), key=_by_order)

    def of_adapter(self, adapter: str) -> list[Running]:
        """Return the running sequences of one adapter in order."""
        return [running for running in self.all() if running.adapter == adapter]

    def enter(self, running: Running) -> None:
        """Add a sequence that has been admitted."""
        self._by_id[running.seq_id] = running
        insort(self.prefilling, running, key=_by_order)

    def begin_decoding(self, running: Running) -> None:
        """Move a sequence whose known tokens are all computed."""
        self._remove(self.prefilling, running)
        running.is_decoding = True
        insort(self.decoding, running, key=_by_order)

    def leave(self, running: Running) -> None:
        """Drop a sequence; the next plan tells the ranks."""
        self._remove(self.decoding if running.is_decoding else self.prefilling, running)
        del self._by_id[running.seq_id]
        self._untold.append(running)

    def foremost(self) -> Running | None:
        """Return the running sequence of the highest priority that arrived first."""
        heads = self.decoding[:1] + self.prefilling[:1]
        return min(heads, key=_by_order, default=None)

    def hindmost(self) -> Running:
        """Return the running sequence of the lowest priority that arrived last; there is one."""
        return max(self.decoding[-1:] + self.prefilling[-1:], key=_by_order)

    @property
    def has_left(self) -> bool:
        """Whether the ranks still have a sequence that no plan has ended."""
        return bool(self._untold)

    def tell_left(self) -> tuple[int, ...]:
        """Return who has left since the last plan, in the order of leaving, for the next one."""
        told, self._untold = self._untold, []
        self._told.append(told)
        return tuple(running.seq_id for running in told)

    def committed(self) -> None:
        """Learn that the ranks have carried out the oldest plan in flight."""
        del self._told[0]

    def is_quiet(self, slot: int) -> bool:
        """Whether no rank has a sequence on a slot any more, not even one that has ended."""
        return all(one.slot != slot for left in (self._untold, *self._told) for one in left)

    @staticmethod
    def _remove(ordered: list[Running], running: Running) -> None:
        at = bisect_left(ordered, running.sequence.order, key=_by_order)
        assert ordered[at] is running, f"sequence {running.seq_id} is out of its place"
        del ordered[at]
