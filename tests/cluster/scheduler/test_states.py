"""Layers with states: a prefix is resumed at checkpoints, on a copy of the state kept there."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.request import BASE
from cluster.scheduler.stats import SchedulerStats
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]


@pytest.fixture
def make_states() -> MakeEngine:
    """Return a maker of engines some of whose layers have states."""

    def make(*, plans_ahead: bool = False, **changes: Any) -> FakeEngine:
        settings: dict[str, Any] = {"num_state_pages": 16}
        return FakeEngine(tiny_config(**(settings | changes)), plans_ahead=plans_ahead)

    return make


@pytest.fixture
def make_large(make_states: MakeEngine) -> MakeEngine:
    """Return a maker of engines with pages of 64 tokens, for prompts of thousands."""

    def make(**changes: Any) -> FakeEngine:
        sizes: dict[str, Any] = {"page_size": 64, "num_pages": 400, "max_model_len": 4096}
        steps = {"token_budget": 512, "max_chunk": 512}
        return make_states(**(sizes | steps | changes))

    return make


def stats_of(engine: FakeEngine) -> SchedulerStats:
    return engine.scheduler.stats()


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 100 * salt) % 997 for i in range(length))


def ask(engine: FakeEngine, tokens: tuple[int, ...], adapter: str = BASE) -> int:
    """Let a prompt be answered and return how much of it was cached."""
    seq_id = engine.add(tokens, max_tokens=2, adapter=adapter)
    engine.run()
    name = None if adapter == BASE else adapter
    assert engine.tokens(seq_id) == fake_continuation(name, tokens, 2)
    return engine.num_cached_tokens(seq_id)


@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize(("num_shared", "num_own"), [(1500, 700), (1600, 600)])
def test_long_prompts_that_part_are_resumed_where_they_do(
    make_large: MakeEngine, num_shared: int, num_own: int, plans_ahead: bool
) -> None:
    """The two workloads of vllm-project/vllm#45238, in which a hybrid's prefixes never hit."""
    engine = make_large(plans_ahead=plans_ahead)
    shared = prompt(num_shared)
    prompts = [shared + prompt(num_own, salt) for salt in (1, 2, 3)]
    # The first leaves checkpoints behind pages 16 and 32 and its last full one, of which the second
    # has the first in common with it: it makes one where they part, in whole pages.
    found = [ask(engine, tokens) for tokens in prompts]
    assert found == [0, 16 * 64, num_shared // 64 * 64]
    last = (num_shared + num_own - 1) // 64 * 64
    assert [ask(engine, tokens) for tokens in prompts] == [last] * 3


def test_a_long_prompt_can_be_resumed_behind_every_so_many_pages(make_large: MakeEngine) -> None:
    engine = make_large()
    ask(engine, prompt(3000))
    assert ask(engine, prompt(2500) + prompt(100, 1)) == 32 * 64


@pytest.mark.parametrize("adapter", [BASE, "A"])
@pytest.mark.parametrize("length", [5, 8, 9, 23, 24, 25])
def test_choices_start_on_the_state_behind_the_last_full_page_of_their_prompt(
    make_states: MakeEngine, adapter: str, length: int
) -> None:
    """The first one's state is of a later position, so what is behind that page is computed anew.

    The fake rank compares each state with the tokens before it.
    """
    engine = make_states()
    seq_ids = engine.add_choices(prompt(length), 4, max_tokens=9, adapter=adapter)
    engine.run()
    name = None if adapter == BASE else adapter
    for seed, seq_id in enumerate(seq_ids):
        assert engine.tokens(seq_id) == fake_continuation(name, prompt(length), 9, seed=seed)
    assert stats_of(engine).counters.forked_sequences == 0
    starts = [start.num_cached_tokens for plan in engine.plans for start in plan.starts]
    assert starts == [0, *[(length - 1) // 4 * 4] * 3]


def test_adapters_have_states_of_their_own(make_states: MakeEngine) -> None:
    engine = make_states()
    assert [ask(engine, prompt(30), name) for name in (BASE, "A", "B")] == [0, 0, 0]
    assert [ask(engine, prompt(30), name) for name in (BASE, "A", "B")] == [28, 28, 28]


def test_an_unload_drops_the_states_of_an_adapter(make_states: MakeEngine) -> None:
    engine = make_states(num_host_state_pages=8)
    for salt in range(6):
        ask(engine, prompt(30, salt), "A")
    assert stats_of(engine).num_checkpoints > 0
    engine.unload("A")
    engine.run()
    stats = stats_of(engine)
    assert stats.num_checkpoints == 0
    assert stats.free_state_pages == stats.total_state_pages
    assert stats.free_host_state_pages == stats.total_host_state_pages
    assert ask(engine, prompt(30), "A") == 0


def test_an_adapter_whose_slot_another_one_took_comes_back_to_its_states(
    make_states: MakeEngine,
) -> None:
    engine = make_states(num_slots=1)
    assert [ask(engine, prompt(30), name) for name in ("A", "B", "A", "B")] == [0, 0, 28, 28]
    assert [load.adapter for load in engine.begun] == ["A", "B", "A", "B"]
