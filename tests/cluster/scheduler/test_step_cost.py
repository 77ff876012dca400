"""No work in a step grows with what waits, what is cached or what is registered."""

from collections.abc import Callable

import pytest

from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.testing.fake_engine import FakeEngine

MakeEngine = Callable[..., FakeEngine]


@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths, in pages, of all prompts that are matched in the cache."""
    lengths: list[int] = []
    match = PrefixCache.match

    def counted(cache: PrefixCache, namespace: object, keys: list[object]) -> object:
        lengths.append(len(keys))
        return match(cache, namespace, keys)

    monkeypatch.setattr(PrefixCache, "match", counted)
    # The check of invariants matches as well.
    monkeypatch.setattr("cluster.scheduler.scheduler.Scheduler.check", lambda scheduler: None)
    return lengths


def test_a_prompt_that_can_get_no_pages_is_not_matched(
    make_engine: MakeEngine, matches: list[int]
) -> None:
    engine = make_engine(num_pages=40, max_model_len=256)
    for number in range(4):
        engine.add((number, 2, 3, 4, 5), max_tokens=40)
    engine.step()
    matches.clear()
    engine.add(tuple(range(140)), max_tokens=4)
    for _ in range(10):
        engine.step()
    assert matches == []
    engine.run()
    assert engine.finish_reason(5) == "length"


def test_a_prompt_that_waits_is_matched_again_only_when_its_tree_has_changed(
    make_engine: MakeEngine, matches: list[int]
) -> None:
    engine = make_engine(num_pages=40, max_model_len=256)
    for number in (1, 2):
        engine.add(tuple(range(100 * number, 100 * number + 48)), max_tokens=24)
    for _ in range(6):
        engine.step()
    matches.clear()
    # It might fit if it shared what the others hold, which only a match tells.
    engine.add(tuple(range(300, 420)), max_tokens=4)
    for _ in range(4):
        engine.step()
    assert matches == [29]
    engine.add((7, 8, 9), max_tokens=2, salt="another tree", priority=-1)
    while not engine.finish_reason(4):
        engine.step()
    assert matches == [29, 0]
    engine.run()
    assert len(matches) > 2  # pages of its own tree were unlocked when the others ended
    assert engine.finish_reason(3) == "length"


def test_nobody_is_matched_in_a_step_without_budget(
    make_engine: MakeEngine, matches: list[int]
) -> None:
    engine = make_engine(token_budget=12, max_running=8, max_chunk=32)
    engine.add(tuple(range(60)), max_tokens=4)
    engine.step()
    engine.add(tuple(range(200, 260)), max_tokens=4)
    matches.clear()
    plan = engine.begin_step()
    assert plan is not None and len(plan.chunks) == 1
    assert sum(len(chunk.token_ids) for chunk in plan.chunks) == 12
    assert matches == []
