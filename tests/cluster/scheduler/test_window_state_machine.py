"""The same with layers that have a sliding window, over two tiny pools.

The fake rank asserts that a row finds in its window exactly what its sequence wrote there, and that
no page is given out while a window has it.
"""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from cluster.scheduler.paging import kv_cache_manager
from tests.cluster.scheduler.test_state_machine import FEATURES, LIMITS, Serving, run_machine
from tests.random_cases import num_cases

WINDOWS: dict[str, st.SearchStrategy[Any]] = {
    "window": st.integers(1, 9),
    "num_window_pages": st.integers(5, 14),
    "num_host_window_pages": st.sampled_from([0, 2, 5, 20]),
    # Many where all layers slide: then these are no memory.
    "num_pages": st.one_of(st.integers(5, 14), st.just(60)),
}
WINDOW_FEATURES = FEATURES | {
    "checkpoint evicted",
    "checkpoint saved",
    "checkpoint restored",
    "host checkpoint evicted",
    "moved on",
    "resumed behind a window",
}


class WindowServing(Serving):
    """Random clients whose sequences are longer than the window, and longer than its pool."""

    seen: set[str] = set()

    @initialize(
        limits=st.fixed_dictionaries(LIMITS | WINDOWS),
        plans_ahead=st.booleans(),
        runs_late=st.booleans(),
    )
    def start(self, limits: dict[str, Any], plans_ahead: bool, runs_late: bool) -> None:
        super().start(limits, plans_ahead, runs_late)

    def _check_rest(self) -> None:
        super()._check_rest()
        stats = self.engine.scheduler.stats()
        assert stats.held_window_pages == 0
        assert stats.free_window_pages + stats.cached_window_pages == stats.total_window_pages
        behind, size = self.config.pages_behind, self.config.page_size
        starts = [start for plan in self.engine.plans for start in plan.starts]
        happened = {
            "checkpoint evicted": stats.counters.evicted_checkpoints,
            "checkpoint saved": stats.counters.saved_checkpoint_pages,
            "checkpoint restored": stats.counters.restored_checkpoint_pages,
            "host checkpoint evicted": stats.counters.evicted_host_checkpoints,
            "moved on": self.limit > stats.total_window_pages * size,
            "resumed behind a window": any(len(start.pages) > behind for start in starts),
        }
        self.seen.update(name for name, count in happened.items() if count)


@pytest.mark.random
def test_any_order_of_calls_keeps_every_invariant_of_both_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache_manager, "CHECKPOINT_PAGES", 3)
    run_machine(WindowServing, WINDOW_FEATURES, num_cases(2400, 7), derandomize=True)


@pytest.mark.slow
def test_any_order_of_calls_keeps_every_invariant_of_both_pools_for_very_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache_manager, "CHECKPOINT_PAGES", 3)
    run_machine(WindowServing, WINDOW_FEATURES, 10_000, derandomize=False)
