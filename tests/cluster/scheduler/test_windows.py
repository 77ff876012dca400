"""Layers with a sliding window: pages are given back, prefixes are resumed at checkpoints."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.scheduler.paging.kv_cache_manager import CHECKPOINT_PAGES
from cluster.scheduler.stats import SchedulerStats
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from worker.testing.fake_rank import fake_continuation

PAGE, WINDOW = 4, 10
BEHIND = 3  # pages of a window before its last one
MakeEngine = Callable[..., FakeEngine]


@pytest.fixture
def make_windows() -> MakeEngine:
    """Return a maker of engines some of whose layers have a window of 10 positions."""

    def make(*, plans_ahead: bool = False, **changes: Any) -> FakeEngine:
        settings: dict[str, Any] = {
            "page_size": PAGE,
            "window": WINDOW,
            "num_window_pages": 32,
            "num_host_window_pages": 0,
        }
        return FakeEngine(tiny_config(**(settings | changes)), plans_ahead=plans_ahead)

    return make


def stats_of(engine: FakeEngine) -> SchedulerStats:
    return engine.scheduler.stats()


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 100 * salt) % 997 for i in range(length))


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_long_answer_holds_the_pages_of_its_window_and_no_others(
    make_windows: MakeEngine, plans_ahead: bool
) -> None:
    engine = make_windows(plans_ahead=plans_ahead, num_pages=60, num_window_pages=BEHIND + 3)
    seq_id = engine.add(prompt(5), max_tokens=200)
    held = []
    while engine.step() is not None:
        held.append(stats_of(engine).held_window_pages)
    assert max(held) == BEHIND + 1
    assert engine.tokens(seq_id) == fake_continuation(None, prompt(5), 200)


def test_nothing_is_refused_that_the_other_layers_have_pages_for(make_windows: MakeEngine) -> None:
    engine = make_windows(num_pages=60, num_window_pages=BEHIND + 2)
    assert engine.scheduler.config.token_limit == 60 * PAGE
    seq_id = engine.add(prompt(150), max_tokens=80)
    engine.run()
    assert engine.tokens(seq_id) == fake_continuation(None, prompt(150), 80)


def test_where_no_window_can_move_its_pages_are_the_limit() -> None:
    config = tiny_config(page_size=PAGE, window=WINDOW, num_window_pages=BEHIND + 1)
    assert config.token_limit == (BEHIND + 1) * PAGE


def test_a_prompt_that_comes_again_starts_behind_its_last_full_page(
    make_windows: MakeEngine,
) -> None:
    for length in (PAGE, PAGE + 1, 30, 32, 33):
        engine = make_windows()
        for _ in range(2):
            seq_id = engine.add(prompt(length), max_tokens=3)
            engine.run()
        assert engine.num_cached_tokens(seq_id) == (length - 1) // PAGE * PAGE


def test_a_conversation_goes_on_behind_the_last_full_page_of_the_answer(
    make_windows: MakeEngine,
) -> None:
    engine = make_windows()
    first = engine.add(prompt(21), max_tokens=30)
    engine.run()
    turn = prompt(21) + engine.tokens(first) + prompt(5, 3)
    second = engine.add(turn, max_tokens=2)
    engine.run()
    assert engine.num_cached_tokens(second) == 50 // PAGE * PAGE


def test_where_two_prompts_part_the_third_starts(make_windows: MakeEngine) -> None:
    engine = make_windows()
    shared = prompt(24)
    found = []
    for salt in (1, 2, 3, 4):
        seq_id = engine.add(shared + prompt(12, salt), max_tokens=2)
        engine.run()
        found.append(engine.num_cached_tokens(seq_id))
    # The second has found where they part, but no window to start on.
    assert found == [0, 0, 24, 24]


def test_a_long_prompt_can_be_resumed_behind_every_so_many_pages(make_windows: MakeEngine) -> None:
    engine = make_windows(
        num_pages=200, num_window_pages=200, max_model_len=800, token_budget=400, max_chunk=400
    )
    length = 2 * CHECKPOINT_PAGES * PAGE + 40
    engine.add(prompt(length), max_tokens=2)
    engine.run()
    for cut in (CHECKPOINT_PAGES * PAGE + 30, 2 * CHECKPOINT_PAGES * PAGE + 10):
        seq_id = engine.add(prompt(cut) + prompt(9, 5), max_tokens=2)
        engine.run()
        stride = CHECKPOINT_PAGES * PAGE
        assert engine.num_cached_tokens(seq_id) == cut // stride * stride


def test_choices_share_the_pages_of_a_window_and_copy_its_last(make_windows: MakeEngine) -> None:
    engine = make_windows()
    seq_ids = engine.add_choices(prompt(23), 3, max_tokens=20)
    engine.run()
    assert stats_of(engine).counters.forked_sequences == 2
    copies = [copy for plan in engine.plans for copy in plan.copies]
    assert [copy.pool for copy in copies if copy.kind == "fork"] == ["full", "window"] * 2
    for seed, seq_id in enumerate(seq_ids):
        assert engine.tokens(seq_id) == fake_continuation(None, prompt(23), 20, seed=seed)


def test_a_preempted_sequence_goes_on_at_its_last_full_page(make_windows: MakeEngine) -> None:
    engine = make_windows(num_window_pages=2 * BEHIND + 4, num_host_window_pages=20, max_running=4)
    seq_ids = [engine.add(prompt(3, salt), max_tokens=40) for salt in (1, 2, 3)]
    engine.run()
    assert stats_of(engine).counters.preemptions > 0
    back = [s for plan in engine.plans for s in plan.starts if s.num_cached_tokens]
    assert back, "nobody came back to what it had computed"
    for salt, seq_id in zip((1, 2, 3), seq_ids, strict=True):
        assert engine.tokens(seq_id) == fake_continuation(None, prompt(3, salt), 40)


def test_checkpoints_go_to_the_host_and_come_back(make_windows: MakeEngine) -> None:
    engine = make_windows(num_window_pages=10, num_host_window_pages=20)
    for salt in (1, 2, 3, 4):
        engine.add(prompt(30, salt), max_tokens=2)
        engine.run()
    assert stats_of(engine).counters.saved_checkpoint_pages > 0
    seq_id = engine.add(prompt(30, 1), max_tokens=2)
    engine.run()
    assert engine.num_cached_tokens(seq_id) == 28
    assert stats_of(engine).counters.restored_checkpoint_pages == BEHIND


def test_of_two_tiers_that_are_full_the_least_recently_used_checkpoint_goes(
    make_windows: MakeEngine,
) -> None:
    engine = make_windows(num_window_pages=14)
    for salt in (1, 2, 1, 3, 4):
        engine.add(prompt(30, salt), max_tokens=2)
        engine.run()
    found = {}
    for salt in (3, 1, 2):
        seq_id = engine.add(prompt(30, salt), max_tokens=2)
        engine.run()
        found[salt] = engine.num_cached_tokens(seq_id)
    assert found == {3: 28, 1: 28, 2: 0}


def test_checkpoints_of_one_path_share_pages(make_windows: MakeEngine) -> None:
    engine = make_windows()
    engine.add(prompt(30), max_tokens=8)
    engine.run()
    stats = stats_of(engine)
    assert stats.num_checkpoints == 2  # behind page 7 of the prompt, and behind page 9 of it all
    assert stats.cached_window_pages == BEHIND + 2


def test_an_unload_drops_the_checkpoints_of_an_adapter(make_windows: MakeEngine) -> None:
    engine = make_windows(num_host_window_pages=20, num_window_pages=10)
    for salt in (1, 2, 3):
        engine.add(prompt(30, salt), max_tokens=2, adapter="A")
        engine.run()
    assert stats_of(engine).num_checkpoints > 0
    engine.unload("A")
    engine.run()
    stats = stats_of(engine)
    assert stats.num_checkpoints == 0
    assert stats.free_window_pages == stats.total_window_pages
    assert stats.free_host_window_pages == stats.total_host_window_pages


def test_a_reset_forgets_checkpoints_but_not_what_sequences_hold(make_windows: MakeEngine) -> None:
    engine = make_windows()
    engine.add(prompt(30, 1), max_tokens=2)
    engine.run()
    seq_id = engine.add(prompt(30, 2), max_tokens=20)
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.scheduler.check()
    stats = stats_of(engine)
    assert (stats.cached_window_pages, stats.num_checkpoints) == (0, 1)
    engine.run()
    assert engine.tokens(seq_id) == fake_continuation(None, prompt(30, 2), 20)


def test_without_a_prefix_cache_there_are_no_checkpoints(make_windows: MakeEngine) -> None:
    engine = make_windows(prefix_cache=False)
    for _ in range(2):
        seq_id = engine.add(prompt(30), max_tokens=20)
        engine.run()
    stats = stats_of(engine)
    assert (stats.num_checkpoints, stats.free_window_pages) == (0, stats.total_window_pages)
    assert engine.num_cached_tokens(seq_id) == 0


def test_plans_of_a_model_without_windows_have_one_kind_of_pages(make_windows: MakeEngine) -> None:
    engine = make_windows(window=0, num_window_pages=0)
    engine.add_choices(prompt(23), 3, max_tokens=20)
    engine.run()
    assert all(not c.new_window_pages for plan in engine.plans for c in plan.chunks)
    assert all(not s.window_pages for plan in engine.plans for s in plan.starts)
    assert all(c.pool == "full" for plan in engine.plans for c in plan.copies)
    assert engine.scheduler._cache.checkpoints is None
