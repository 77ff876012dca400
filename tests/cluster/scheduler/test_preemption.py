"""When pages run out."""

from collections.abc import Callable

import pytest

from cluster.request import BASE
from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.protocol import SamplingParams
from worker.testing.fake_rank import fake_continuation, fake_prompt_logprobs

MakeEngine = Callable[..., FakeEngine]


def prompt(salt: int, length: int = 8) -> tuple[int, ...]:
    return tuple(salt * 1000 + i for i in range(length))


def test_preemption_gives_the_same_tokens_as_the_unconstrained_run(make_engine: MakeEngine) -> None:
    tight, wide = make_engine(num_pages=12, num_slots=4), make_engine(num_pages=500, num_slots=4)
    for engine in (tight, wide):
        for salt, adapter in enumerate((BASE, "A", "B", BASE, "A", "C")):
            engine.add(prompt(salt), 25, adapter)
        engine.run()
    assert tight.scheduler.stats().counters.preemptions > 0
    assert wide.scheduler.stats().counters.preemptions == 0
    for seq_id in range(1, 7):
        assert tight.tokens(seq_id) == wide.tokens(seq_id)
        assert [e.num_cached_tokens for e in tight.events[seq_id]] == [0] * 25
    stats = tight.scheduler.stats()
    assert stats.free_pages + stats.cached_pages == 12


def test_the_latest_arrival_gives_way_and_resumes_by_a_match(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=9)
    engine.add(prompt(1), 24)
    engine.add(prompt(2), 20)
    while not engine.scheduler.stats().counters.preemptions:
        engine.step()
    assert [p.ends for p in engine.plans if p.ends] == [(2,)]
    engine.run()
    resumed = [start for plan in engine.plans for start in plan.starts if start.seq_id == 2]
    assert len(resumed) >= 2
    assert resumed[1].num_prompt_tokens == 8
    assert engine.tokens(1) == fake_continuation(None, prompt(1), 24)
    assert engine.tokens(2) == fake_continuation(None, prompt(2), 20)
    ends = [end for plan in engine.plans for end in plan.ends]
    assert ends.count(1) <= 1  # the oldest is never sent back


def test_who_was_sent_back_is_admitted_before_later_arrivals(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=9)
    engine.add(prompt(1), 24)
    engine.add(prompt(2), 20)
    while not engine.scheduler.stats().counters.preemptions:
        engine.step()
    engine.add(prompt(3), 1)
    engine.run()
    starts = [start.seq_id for plan in engine.plans for start in plan.starts]
    assert starts.index(3) > [i for i, seq_id in enumerate(starts) if seq_id == 2][1]


def test_cached_pages_are_evicted_before_anyone_gives_way(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=8)
    for salt in range(6):
        engine.add(prompt(salt), 10)
        engine.run()
    stats = engine.scheduler.stats()
    assert stats.counters.evicted_pages > 0
    assert stats.counters.preemptions == 0


def test_a_request_that_fills_the_whole_pool_runs_to_its_end(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=6, max_model_len=24)
    for salt in range(3):
        engine.add(prompt(salt, 12), 12)
    engine.run()
    for salt in range(3):
        assert engine.tokens(salt + 1) == fake_continuation(None, prompt(salt, 12), 12)


def test_equal_prompts_whose_copies_fill_the_pool_still_end(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=10, max_model_len=40)
    for max_tokens in (2, 28, 28):
        engine.add(prompt(1, 12), max_tokens)
    engine.run()
    for seq_id, num_tokens in ((1, 2), (2, 28), (3, 28)):
        assert engine.tokens(seq_id) == fake_continuation(None, prompt(1, 12), num_tokens)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(pooling="mean"), SamplingParams(prompt_logprobs=0)]
)
def test_a_prompt_that_is_computed_though_it_is_cached_ends_in_a_pool_too_small_for_both(
    make_engine: MakeEngine, sampling: SamplingParams
) -> None:
    engine = make_engine(num_pages=6, max_chunk=8)
    engine.add(prompt(1, 20), 1)
    engine.run()
    seq_id = engine.add(prompt(1, 20), 1, sampling=sampling)
    engine.run(max_steps=100)
    assert engine.finish_reason(seq_id) in ("stop", "length")
    (start,) = [start for plan in engine.plans for start in plan.starts if start.seq_id == seq_id]
    assert start.num_cached_tokens == 0


def test_a_scored_prompt_is_not_scored_again_after_a_preemption(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=9)
    scores = SamplingParams(prompt_logprobs=0)
    seq_ids = [engine.add(prompt(salt), 24, sampling=scores) for salt in (1, 2)]
    engine.run(max_steps=200)
    assert engine.scheduler.stats().counters.preemptions > 0
    for salt, seq_id in zip((1, 2), seq_ids, strict=True):
        first, *others = engine.events[seq_id]
        assert first.prompt_logprobs == fake_prompt_logprobs(None, prompt(salt))
        assert not any(event.prompt_logprobs for event in others)
        starts = [start for plan in engine.plans for start in plan.starts if start.seq_id == seq_id]
        assert [start.num_cached_tokens > 0 for start in starts] == [False, True][: len(starts)]


def test_an_exhausted_pool_defers_an_admission_without_touching_anything(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_pages=10)
    engine.add(prompt(1, 24), 9)
    engine.step()
    before = engine.scheduler.stats()
    engine.add(prompt(1, 24)[:20] + prompt(2, 12), 1)
    engine.step()
    after = engine.scheduler.stats()
    assert (after.num_waiting, after.cached_pages, after.counters.evicted_pages) == (1, 0, 0)
    assert after.held_pages == before.held_pages + 1  # the decode's new page
    engine.run()
    assert engine.finish_reason(2) == "length"


def test_an_older_prefill_takes_the_pages_of_a_decode_planned_in_the_same_step(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(num_pages=12, max_running=2, token_budget=6, max_model_len=44)
    engine.add(prompt(1, 40), 1)
    engine.add(prompt(2, 2), 30)
    engine.run()
    (before,) = [p for p in engine.plans if p.step < 12 and 2 in p.ends]
    assert [chunk.seq_id for chunk in before.chunks] == [1]
    assert before.starts == ()  # who gave way does not return in the same step
    assert engine.tokens(1) == fake_continuation(None, prompt(1, 40), 1)
    assert engine.tokens(2) == fake_continuation(None, prompt(2, 2), 30)
