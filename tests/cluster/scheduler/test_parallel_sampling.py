"""Choices of one prompt: computed once, shared by page, each with its own tokens."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ErrorInfo, InvalidRequest, Overloaded
from cluster.request import BASE, Request
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from worker.protocol import SamplingParams
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]
PROMPT = tuple(range(100, 111))  # two pages of four and three positions more


def _num_computed(engine: FakeEngine) -> int:
    return sum(len(chunk.token_ids) for plan in engine.plans for chunk in plan.chunks)


def test_each_choice_gets_the_tokens_of_a_request_on_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for seed, seq_id in enumerate(engine.add_choices(PROMPT, 4, max_tokens=9, adapter="A")):
        assert seq_id == seed + 1
    engine.run()
    for seed in range(4):
        assert engine.tokens(seed + 1) == fake_continuation("A", PROMPT, 9, seed=seed)


def test_the_prompt_is_computed_once_and_its_last_token_once_more_for_each_other_choice(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.add_choices(PROMPT, 5, max_tokens=2)
    engine.run()
    num_decoded = 5  # the second token of each
    assert _num_computed(engine) == len(PROMPT) + 4 * 1 + num_decoded


def test_a_choice_copies_only_the_last_partial_page(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_choices(PROMPT, 3, max_tokens=6)
    engine.run()
    copies = [copy for plan in engine.plans for copy in plan.copies]
    assert [(copy.kind, copy.num_positions) for copy in copies] == [("fork", 2), ("fork", 2)]
    starts = {start.seq_id: start for plan in engine.plans for start in plan.starts}
    assert starts[2].pages[:2] == starts[3].pages[:2]
    assert starts[2].pages[2] != starts[3].pages[2]
    assert engine.scheduler.stats().counters.forked_sequences == 2


def test_a_choice_forks_from_a_first_one_that_came_back_to_more_than_the_prompts_pages(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_pages=6, max_running=2)
    engine.add_choices(PROMPT, 2, max_tokens=9)
    engine.add_choices(PROMPT, 2, max_tokens=9)
    engine.run()
    leaders = [start for plan in engine.plans for start in plan.starts if start.seq_id in (1, 3)]
    assert any(start.num_cached_tokens > len(PROMPT) for start in leaders), "one came back to more"
    assert engine.scheduler.stats().counters.forked_sequences == 2


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_prompts_of_any_length_fork_also_shorter_than_a_page(
    make_engine: MakeEngine, length: int
) -> None:
    engine = make_engine()
    prompt = PROMPT[:length]
    engine.add_choices(prompt, 3, max_tokens=5)
    engine.run()
    for seed in range(3):
        assert engine.tokens(seed + 1) == fake_continuation(None, prompt, 5, seed=seed)


def test_choices_are_taken_all_or_none(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting=3)
    engine.add((1,))
    with pytest.raises(Overloaded, match="3 more"):
        engine.add_choices(PROMPT, 3)
    assert engine.scheduler.stats().num_waiting == 1
    engine.add_choices(PROMPT, 2)
    assert engine.scheduler.stats().num_waiting == 3
    with pytest.raises(Overloaded):
        engine.add((1,))


def test_choices_of_different_prompts_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    requests = tuple(Request(str(i), BASE, (i, 2), SamplingParams(), 3) for i in range(2))
    with pytest.raises(InvalidRequest, match="same prompt"):
        engine.add_all(requests)
    with pytest.raises(InvalidRequest):
        engine.add_all(())


def test_when_the_first_choice_is_aborted_before_its_token_the_others_go_on(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(token_budget=12, max_chunk=4)
    ids = engine.add_choices(PROMPT, 3, max_tokens=5)
    engine.step()
    engine.abort(ids[0])
    engine.run()
    assert engine.tokens(ids[0]) == ()
    for seed in (1, 2):
        assert engine.tokens(ids[seed]) == fake_continuation(None, PROMPT, 5, seed=seed)


def test_every_choice_can_be_aborted_while_it_is_held(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = engine.add_choices(PROMPT, 4, max_tokens=5, adapter="A")
    for seq_id in reversed(ids):
        engine.abort(seq_id)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_waiting == stats.held_pages == 0
    engine.unload("A")
    assert [gone.digest for gone in engine.unloaded] == ["A"]


def test_a_failed_load_fails_every_choice(make_engine: MakeEngine) -> None:
    engine = make_engine(loads_at_once=False)
    ids = engine.add_choices(PROMPT, 3, adapter="A")
    engine.step()
    gone = ErrorInfo("NotFound", "gone")
    engine.fail_load(gone)
    assert [engine.events[seq_id][-1].error for seq_id in ids] == [gone] * 3
    assert engine.is_idle


def test_an_unload_waits_for_all_choices(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = engine.add_choices(PROMPT, 3, max_tokens=6, adapter="A")
    engine.step()
    engine.step()
    engine.unload("A")
    assert not engine.unloaded
    engine.run()
    assert [gone.digest for gone in engine.unloaded] == ["A"]
    for seed, seq_id in enumerate(ids):
        assert engine.tokens(seq_id) == fake_continuation("A", PROMPT, 6, seed=seed)


def test_choices_inherit_the_adapter_and_stay_in_its_namespace(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_choices(PROMPT, 3, max_tokens=8, adapter="A")
    engine.run()
    after_a = engine.add(PROMPT, 1, "A")
    after_base = engine.add(PROMPT, 1)
    engine.run()
    assert engine.num_cached_tokens(after_a) == 8
    assert engine.num_cached_tokens(after_base) == 0


@given(
    length=st.integers(1, 14),
    count=st.integers(1, 6),
    max_tokens=st.integers(1, 10),
    num_pages=st.integers(7, 16),
    num_host_pages=st.sampled_from([0, 3, 20]),
    max_chunk=st.sampled_from([2, 4, 32]),
    prefix_cache=st.booleans(),
)
def test_under_any_pressure_every_choice_gets_its_own_tokens(
    length: int,
    count: int,
    max_tokens: int,
    num_pages: int,
    num_host_pages: int,
    max_chunk: int,
    prefix_cache: bool,
) -> None:
    config = tiny_config(
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        page_size=2,
        max_chunk=max_chunk,
        max_running=3,
        token_budget=8,
        prefix_cache=prefix_cache,
    )
    engine = FakeEngine(config)
    prompt = tuple(range(min(length, config.token_limit - 1)))
    ids = engine.add_choices(prompt, count, max_tokens)
    more = engine.add_choices(prompt, count, max_tokens, "A")
    engine.run()
    limit = min(max_tokens, config.token_limit - len(prompt))
    for seed in range(count):
        assert engine.tokens(ids[seed]) == fake_continuation(None, prompt, limit, seed=seed)
        assert engine.tokens(more[seed]) == fake_continuation("A", prompt, limit, seed=seed)
