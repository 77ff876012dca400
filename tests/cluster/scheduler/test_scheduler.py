"""Scenarios of continuous batching, chunked prefill, prefix cache and aborts."""

from collections.abc import Callable

import pytest

from cluster.errors import InvalidRequest, Overloaded
from cluster.request import BASE
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.protocol import Plan, SamplingParams
from worker.testing.fake_rank import fake_continuation

MakeEngine = Callable[..., FakeEngine]


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


def chunks_of(plan: Plan | None) -> dict[int, int]:
    """Return sequence: tokens computed."""
    assert plan is not None
    return {chunk.seq_id: len(chunk.token_ids) for chunk in plan.chunks}


def assert_all_pages_back(engine: FakeEngine) -> None:
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.held_pages) == (0, 0, 0)
    assert stats.free_pages + stats.cached_pages == stats.total_pages


def test_a_request_gets_the_tokens_of_the_model_and_ends_at_its_length(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    seq_id = engine.add(prompt(10), 6)
    engine.run()
    assert seq_id == 1
    assert engine.tokens(1) == fake_continuation(None, prompt(10), 6)
    assert [e.finish_reason for e in engine.events[1]] == [None] * 5 + ["length"]
    assert_all_pages_back(engine)


def test_a_stop_token_ends_the_answer_and_is_in_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = fake_continuation(None, prompt(5), 8)
    engine.add(prompt(5), 8, stop_token_ids=(expected[2],))
    engine.run()
    assert engine.tokens(1) == expected[:3]
    assert engine.finish_reason(1) == "stop"


def test_log_probabilities_are_passed_on_only_to_who_asked(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(3), 1, sampling=SamplingParams(num_logprobs=2))
    engine.add(prompt(3), 1)
    engine.run()
    (asked,), (silent,) = engine.events[1], engine.events[2]
    assert len(asked.logprobs) == 1 and len(asked.top_logprobs[0]) == 2
    assert (silent.logprobs, silent.top_logprobs) == ((), ())


def test_what_can_never_fit_is_refused_at_the_door(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=4, max_model_len=256)
    for token_ids, max_tokens in ((prompt(16), 1), ((), 1), (prompt(3), 0)):
        with pytest.raises(InvalidRequest):
            engine.add(token_ids, max_tokens)
    assert engine.add(prompt(15), 1) == 1  # refusals use up no number
    engine.run()
    assert engine.finish_reason(1) == "length"


def test_max_tokens_is_cut_to_what_the_context_holds(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=20)
    engine.add(prompt(15), 100)
    engine.run()
    assert len(engine.tokens(1)) == 5
    assert engine.finish_reason(1) == "length"


def test_a_full_queue_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting=2)
    engine.add(prompt(3))
    engine.add(prompt(3))
    with pytest.raises(Overloaded) as refusal:
        engine.add(prompt(3))
    assert refusal.value.retry_after is not None
    engine.run()
    assert engine.add(prompt(3)) == 3


def test_decodes_are_never_starved_by_a_long_prefill(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(3), 30)
    engine.step()
    engine.add(prompt(200, salt=1), 1)
    plans = [engine.step() for _ in range(7)]
    assert [chunks_of(plan) for plan in plans] == [{1: 1, 2: 28}] * 7


def test_a_prefill_is_never_starved_by_decodes(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=8, token_budget=12)
    for salt in range(7):
        engine.add(prompt(3, salt), 100)
    while engine.scheduler.stats().num_running < 7:
        engine.step()
    engine.add(prompt(20, salt=9), 1)
    plans = [engine.step() for _ in range(5)]
    assert [chunks_of(plan)[8] for plan in plans] == [4] * 5
    assert engine.finish_reason(8) == "length"


def test_chunks_end_at_page_boundaries_but_the_last(make_engine: MakeEngine) -> None:
    engine = make_engine(token_budget=15, max_chunk=11)
    engine.add(prompt(21), 1)
    engine.run()
    chunks = [chunk for plan in engine.plans for chunk in plan.chunks]
    assert [(c.start, len(c.token_ids), c.samples) for c in chunks] == [
        (0, 8, False),
        (8, 8, False),
        (16, 5, True),
    ]


def test_admission_is_by_arrival_and_a_full_batch_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=2)
    for salt in range(4):
        engine.add(prompt(3, salt), 2)
    assert list(chunks_of(engine.step())) == [1, 2]
    engine.step()
    assert list(chunks_of(engine.step())) == [3, 4]


def test_the_same_prompt_again_is_a_hit_up_to_its_last_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(16), 1)
    engine.run()
    engine.add(prompt(16), 1)
    engine.run()
    assert engine.num_cached_tokens(1) == 0
    assert engine.num_cached_tokens(2) == 12  # a full match is capped: the last token is computed
    assert engine.tokens(2) == engine.tokens(1)
    stats = engine.scheduler.stats()
    assert (stats.counters.prompt_tokens, stats.counters.cached_prompt_tokens) == (32, 12)


def test_cached_tokens_are_told_once_with_the_first_event(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for _ in range(2):
        engine.add(prompt(13), 3)
        engine.run()
    assert [event.num_cached_tokens for event in engine.events[2]] == [12, 0, 0]


def test_an_answer_is_cached_for_the_next_turn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(6), 7)
    engine.run()
    engine.add(prompt(6) + engine.tokens(1) + (1, 2, 3), 1)
    engine.run()
    assert engine.num_cached_tokens(2) == 12


def test_a_prefix_is_shared_while_its_first_user_still_prefills(make_engine: MakeEngine) -> None:
    engine = make_engine(token_budget=16, max_chunk=8)
    engine.add(prompt(100), 1)
    engine.step()
    engine.step()
    engine.add(prompt(100)[:15], 1)
    engine.run()
    assert engine.num_cached_tokens(2) == 12


def test_two_equal_prompts_in_one_step_end_with_one_copy(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(12), 3)
    engine.add(prompt(12), 3)
    assert len(chunks_of(engine.step())) == 2
    engine.run()
    assert engine.tokens(1) == engine.tokens(2)
    assert engine.scheduler.stats().cached_pages == 3
    assert_all_pages_back(engine)


def test_two_adapters_never_share_pages(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for adapter in (BASE, "A", "B", "A"):
        engine.add(prompt(13), 5, adapter)
        engine.run()
    assert [engine.num_cached_tokens(seq_id) for seq_id in (1, 2, 3, 4)] == [0, 0, 0, 12]
    for seq_id, adapter in ((1, None), (2, "A"), (3, "B"), (4, "A")):
        assert engine.tokens(seq_id) == fake_continuation(adapter, prompt(13), 5)


def test_salts_isolate_and_cannot_spell_an_adapter(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for adapter, salt in (("A", ""), (BASE, "A"), (BASE, "B"), (BASE, "B")):
        engine.add(prompt(13), 1, adapter, salt=salt)
        engine.run()
    assert [engine.num_cached_tokens(seq_id) for seq_id in (1, 2, 3, 4)] == [0, 0, 0, 12]


def test_without_a_prefix_cache_nothing_is_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    for _ in range(2):
        engine.add(prompt(13), 5)
        engine.run()
    assert engine.num_cached_tokens(2) == 0
    assert engine.tokens(1) == engine.tokens(2)
    assert engine.scheduler.stats().free_pages == 64


def test_a_step_must_be_committed_before_the_one_after_the_next(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(3))
    engine.begin_step()
    engine.begin_step()
    with pytest.raises(AssertionError, match="not committed"):
        engine.scheduler.schedule()


def test_an_idle_scheduler_has_no_plan(make_engine: MakeEngine) -> None:
    scheduler: Scheduler = make_engine().scheduler
    assert scheduler.schedule() is None
    assert scheduler.stats().step == 0


def test_penalties_see_the_cached_tokens_too(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(prompt(16), 1)
    engine.run()
    engine.add(prompt(16), 1, sampling=SamplingParams(presence_penalty=1.0))
    engine.run()  # the fake rank checks the history against the pages
    assert engine.plans[-1].starts[0].history == prompt(12)
