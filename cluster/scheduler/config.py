"""The limits under which the scheduler decides."""

from dataclasses import dataclass, replace

from worker.pools import PageCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and limits of one scheduler; pages, tokens, steps and bytes, never seconds."""

    base_digest: str  # what the base model is; part of every namespace
    num_pages: int  # 0: not known before the ranks have said what fits
    num_host_pages: int = 0  # KV pages in host memory, for what the device evicts
    page_size: int  # tokens
    window: int = 0  # tokens that a row sees in layers with pages of their own; 0: there are none
    num_window_pages: int = 0  # of those layers
    num_host_window_pages: int = 0
    num_state_pages: int = 0  # of layers with states, one for each sequence; 0: there are none
    num_host_state_pages: int = 0
    max_model_len: int  # prompt and output together, tokens
    num_slots: int = 8  # adapters resident at once; 0: the base model only
    adapter_memory: int = 0  # bytes of all resident adapters on each rank; 0: slots are the limit
    max_running: int = 64  # sequences
    max_waiting: int = 1024  # sequences; `add` refuses beyond
    token_budget: int = 2048  # tokens computed in one step
    max_chunk: int = 2048  # tokens of one sequence computed in one step
    slot_patience: int = 64  # steps an adapter is passed over before a slot is drained for it
    drain_steps: int = 64  # steps a drained slot's sequences have before they are preempted
    prefix_cache: bool = True  # False: every prompt is computed from its first token
    fairness: bool = True  # False: first come, first served, among requests of one priority

    def __post_init__(self) -> None:
        """Refuse limits under which some work could never progress.

        Raises:
            ValueError: naming the limit.
        """
        for name in ("page_size", "max_running", "max_waiting", "slot_patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            *("num_pages", "num_host_pages", "num_slots", "adapter_memory", "drain_steps"),
            *("window", "num_window_pages", "num_host_window_pages"),
            *("num_state_pages", "num_host_state_pages"),
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.num_state_pages == 1 or (self.num_state_pages and self.window):
            raise ValueError("there must be two state pages at least, and no window beside them")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.token_budget < self.max_running + self.page_size:
            raise ValueError(
                f"token_budget {self.token_budget} is too small: a step must have room for one "
                f"token of each of max_running={self.max_running} sequences and one page of "
                f"{self.page_size} tokens, or a prefill could starve behind decodes"
            )
        if self.max_chunk < self.page_size:
            raise ValueError(f"max_chunk must hold a page of {self.page_size} tokens")

    def with_pages(
        self, window: int, pages: PageCounts, host_pages: PageCounts
    ) -> "SchedulerConfig":
        """Return the same of ranks with so many pages, on the device and in host memory."""
        return replace(
            self,
            window=window,
            num_pages=pages.full,
            num_host_pages=host_pages.full,
            num_window_pages=pages.window,
            num_host_window_pages=host_pages.window,
            num_state_pages=pages.state,
            num_host_state_pages=host_pages.state,
        )

    @property
    def pages(self) -> PageCounts:
        """Of every pool, on the device."""
        return PageCounts(self.num_pages, self.num_window_pages, self.num_state_pages)

    @property
    def host_pages(self) -> PageCounts:
        """Of every pool, in host memory."""
        return PageCounts(
            self.num_host_pages, self.num_host_window_pages, self.num_host_state_pages
        )

    @property
    def token_limit(self) -> int:
        """Tokens that the longest sequence may have, prompt and output together."""
        limit = min(self.max_model_len, self.num_pages * self.page_size)
        # A window moves if there is room for it, a page that it has left in part and a new one.
        if self.window and self.num_window_pages < self.pages_behind + 2:
            limit = min(limit, self.num_window_pages * self.page_size)
        return limit

    @property
    def most_pages(self) -> int:
        """Pages of the largest pool."""
        return max(*self.pages.by_pool().values(), *self.host_pages.by_pool().values())

    @property
    def pages_behind(self) -> int:
        """Window pages before the first position of a page that it may see; at least one."""
        return max(1, -(-(self.window - 1) // self.page_size))

    @property
    def most_window_pages(self) -> int:
        """Window pages that a sequence needs at once, at most, to go on by its longest chunks."""
        chunk = -(-min(self.max_chunk, self.token_budget) // self.page_size)
        return min(self.pages_behind + 1 + chunk, self.num_window_pages)

    def slot_wait_bound(
        self, place: int, num_unpinned_slots: int, turn_start: int = 0, *, is_crowded: bool = False
    ) -> int:
        """Return the most steps that an adapter waits for a slot.

        `place` is its place in the line when it joined, 1 for the first. With fairness as many
        may still come before it as were there, but for the first. `turn_start` is the
        most steps between a slot's hand-over and the first sequence that runs on it: the load, and
        the wait for pages and batch room, which are not the slot's doing.

        The first in line has waited at most `slot_patience` steps when a slot must be drained for
        it. A slot may be drained once its turn has lasted `slot_patience` steps, and its sequences
        then have `drain_steps` before they are preempted. One slot is drained at a time. With a
        single slot the foremost running sequence, which is not preempted, is waited for instead.
        An adapter whose requests are of lower priority than those behind it in line may lose a slot
        that it could not use for `slot_patience` steps, and then waits anew.

        Where `adapter_memory` may hold fewer adapters than there are slots, `is_crowded`, several
        may have to go for one, the foremost running sequence's among them.
        """
        drains = (self.drain_steps + 1) * (num_unpinned_slots if is_crowded else 1)
        if num_unpinned_slots == 1:
            drains = self.token_limit + 1
        elif is_crowded:
            drains += self.token_limit
        turns = 2 * place - 1 if self.fairness else place
        return self.slot_patience + turns * (turn_start + self.slot_patience + drains)
