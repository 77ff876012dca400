"""The running sequences: admitted, decoding, preempted, ended.

The one place where a sequence begins or ceases to run, and what it holds moves with it: pages and
prefix lock through the KV cache manager, the adapter lease through the slot table.
"""

from bisect import bisect_left, insort
from collections.abc import Container
from operator import attrgetter

from cluster.request import BASE
from cluster.scheduler.kv_cache.radix_tree import Match
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.paging.kv_cache_manager import KVCacheManager
from cluster.scheduler.request_queue import RequestQueue
from cluster.scheduler.sequence import Running, Sequence, Status
from cluster.scheduler.stats import SchedulerCounters

_by_order = attrgetter("sequence.order")


class RunningSet:
    """Who is running, by priority and arrival, and who has left since the last plan was made."""

    def __init__(
        self,
        kv: KVCacheManager,
        slots: SlotTable,
        waiting: RequestQueue,
        counters: SchedulerCounters,
    ) -> None:
        self.decoding: list[Running] = []  # one token each step
        self.prefilling: list[Running] = []  # K/V of known tokens still missing
        self.by_id: dict[int, Running] = {}
        self._left: list[Running] = []  # no plan has told the ranks yet
        self._left_in_flight: list[list[Running]] = []  # by plan in flight, the oldest first
        self._kv = kv
        self._slots = slots
        self._waiting = waiting
        self._counters = counters

    def __len__(self) -> int:
        return len(self.by_id)

    def get(self, seq_id: int) -> Running | None:
        """Return what a sequence holds, if it is running."""
        return self.by_id.get(seq_id)

    def all(self) -> list[Running]:
        """Return every running sequence in order."""
        return sorted(self.by_id.values(), key=_by_order)

    def of_adapter(self, adapter: str) -> list[Running]:
        """Return the running sequences of one adapter in order."""
        return [running for running in self.all() if running.adapter == adapter]

    def admit(self, sequence: Sequence, match: Match, step: int) -> Running:
        """Waiting to running: lease the adapter, lock the matched prefix, on the device."""
        assert sequence.status is Status.WAITING, f"sequence {sequence.seq_id} is not waiting"
        adapter = sequence.request.adapter
        tenant = sequence.flow.tenant
        slot = None if adapter == BASE else self._slots.lease(adapter, step, tenant)
        running = self._kv.take(sequence, slot, match, step)
        sequence.status = Status.RUNNING
        sequence.match = None
        self.by_id[running.seq_id] = running
        insort(self.prefilling, running, key=_by_order)
        return running

    def begin_decoding(self, running: Running) -> None:
        """Move a sequence whose known tokens are all computed."""
        self._remove(self.prefilling, running)
        running.is_decoding = True
        insort(self.decoding, running, key=_by_order)

    def begin_prefill(self, running: Running) -> None:
        """Move a sequence of which more than the last token is known and not computed."""
        self._remove(self.decoding, running)
        running.is_decoding = False
        insort(self.prefilling, running, key=_by_order)

    def preempt(self, running: Running, step: int) -> None:
        """Running to waiting, at its arrival place: full pages stay in the namespace.

        So it resumes by a match. No step that writes its pages may be in flight.
        """
        self._release(running, Status.WAITING, step, caches=True)
        self._waiting.push(running.seq_id, running.sequence.flow)
        self._counters.preemptions += 1

    def finish(self, running: Running, step: int) -> None:
        """Running to finished: full pages stay in the namespace, unless it has failed."""
        self._release(running, Status.FINISHED, step, caches=not running.is_failed)

    def foremost(self) -> Running | None:
        """Return the running sequence of the highest priority that arrived first."""
        heads = self.decoding[:1] + self.prefilling[:1]
        return min(heads, key=_by_order, default=None)

    def hindmost(self, spared: Container[int] = ()) -> Running:
        """Return the running sequence of the lowest priority that arrived last.

        There is one beside those that are spared, which are at their prompts.
        """
        last = next((one for one in reversed(self.prefilling) if one.seq_id not in spared), None)
        return max(self.decoding[-1:] + ([] if last is None else [last]), key=_by_order)

    @property
    def num_reserved(self) -> int:
        """Return the pages that running sequences will soon need.

        Each keeps room for its known tokens and one page more, or an admission would only make the
        next step preempt it.
        """
        return len(self) + sum(
            self._kv.num_pages(len(running.sequence.tokens)) - len(running.pages)
            for running in self.prefilling
        )

    @property
    def num_window_reserved(self) -> int:
        """Return the window pages that running sequences will soon need, likewise."""
        windows = self._kv.windows
        if windows is None:
            return 0
        num_pages = self._kv.num_pages
        return len(self) + sum(
            max(0, windows.need(num_pages(len(one.sequence.tokens))) - len(one.window_pages))
            for one in self.prefilling
        )

    @property
    def has_left(self) -> bool:
        """Whether the ranks still have a sequence that no plan has ended."""
        return bool(self._left)

    def take_left(self) -> tuple[int, ...]:
        """Return who has left since the last plan, in the order of leaving, for the next one."""
        left, self._left = self._left, []
        self._left_in_flight.append(left)
        return tuple(running.seq_id for running in left)

    def committed(self) -> None:
        """Note that the ranks have carried out the oldest plan in flight."""
        del self._left_in_flight[0]

    def uses_slot(self, slot: int) -> bool:
        """Whether a rank may still have a sequence on a slot that has left the running set."""
        return any(one.slot == slot for left in (self._left, *self._left_in_flight) for one in left)

    def _release(self, running: Running, status: Status, step: int, *, caches: bool) -> None:
        """Give back all that a sequence holds; the next plan tells the ranks."""
        assert running.sequence.status is Status.RUNNING, f"sequence {running.seq_id} stops twice"
        self._kv.free(running, step, caches=caches)
        if running.slot is not None:
            self._slots.release(running.adapter, step)
        running.sequence.status = status
        self._remove(self.decoding if running.is_decoding else self.prefilling, running)
        del self.by_id[running.seq_id]
        self._left.append(running)

    @staticmethod
    def _remove(ordered: list[Running], running: Running) -> None:
        at = bisect_left(ordered, running.sequence.order, key=_by_order)
        assert ordered[at] is running, f"sequence {running.seq_id} is out of its place"
        del ordered[at]


def fork_source(running: RunningSet, sequence: Sequence, match: Match) -> Running | None:
    """Return the running sequence whose last prompt page this one shares in part, if one does.

    It has computed the same prompt; what is left to this one is the last token, for its logits.
    """
    num_shared = sequence.num_prompt_tokens - 1
    if sequence.leader is None or len(sequence.tokens) - 1 > num_shared:
        return None
    if sequence.wants_prompt_logprobs:
        return None  # of all its tokens
    num_pages, rest = divmod(num_shared, sequence.page_size)
    source = running.get(sequence.leader.seq_id)
    if rest == 0 or match.num_pages < num_pages or source is None:
        return None
    if (source.window_pages and source.first_window > num_pages) or source.state_pages:
        return None  # its window has left the page; its state is of a later position
    return source if source.num_computed >= num_shared else None
