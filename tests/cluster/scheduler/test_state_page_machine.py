"""The same with layers that have states, over a pool of full pages and one of states.

The fake rank asserts that a chunk finds the state that its sequence's last chunk has left, and that
a sequence which is resumed starts on a copy of the state behind its cached prefix.
"""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from cluster.scheduler.paging import kv_cache_manager
from tests.cluster.scheduler.test_state_machine import FEATURES, LIMITS, Serving, run_machine
from tests.random_cases import num_cases

STATES: dict[str, st.SearchStrategy[Any]] = {
    "num_state_pages": st.integers(2, 12),
    "num_host_state_pages": st.sampled_from([0, 1, 3, 20]),
    "num_pages": st.one_of(st.integers(5, 14), st.just(60)),
}
STATE_FEATURES = (FEATURES - {"forked"}) | {
    "checkpoint evicted",
    "checkpoint saved",
    "checkpoint restored",
    "host checkpoint evicted",
    "kept before a chunk",
    "resumed",
}


class StateServing(Serving):
    """Random clients of layers with states, of which there are few."""

    seen: set[str] = set()

    @initialize(
        limits=st.fixed_dictionaries(LIMITS | STATES),
        plans_ahead=st.booleans(),
        runs_late=st.booleans(),
    )
    def start(self, limits: dict[str, Any], plans_ahead: bool, runs_late: bool) -> None:
        super().start(limits, plans_ahead, runs_late)

    def _check_rest(self) -> None:
        super()._check_rest()
        stats = self.engine.scheduler.stats()
        assert stats.held_state_pages == 0
        assert stats.free_state_pages + stats.cached_state_pages == stats.total_state_pages
        starts = [start for plan in self.engine.plans for start in plan.starts]
        copies = {copy.target for plan in self.engine.plans for copy in plan.copies}
        own = {start.state_page for start in starts}
        happened = {
            "checkpoint evicted": stats.counters.evicted_checkpoints,
            "checkpoint saved": stats.counters.saved_checkpoint_pages,
            "checkpoint restored": stats.counters.restored_checkpoint_pages,
            "host checkpoint evicted": stats.counters.evicted_host_checkpoints,
            "kept before a chunk": copies - own,
            "resumed": any(start.num_cached_tokens for start in starts),
        }
        self.seen.update(name for name, count in happened.items() if count)


@pytest.mark.random
def test_any_order_of_calls_keeps_every_invariant_of_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache_manager, "CHECKPOINT_PAGES", 3)
    run_machine(StateServing, STATE_FEATURES, num_cases(2400, 7), derandomize=True)


@pytest.mark.slow
def test_any_order_of_calls_keeps_every_invariant_of_states_for_very_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache_manager, "CHECKPOINT_PAGES", 3)
    run_machine(StateServing, STATE_FEATURES, 10_000, derandomize=False)
