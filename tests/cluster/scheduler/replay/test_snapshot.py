"""A scheduler restored from a snapshot goes on exactly as the one that it was taken of."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import Conflict, TopworkError
from cluster.request import BASE
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.namespace import namespace
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.replay.cache_snapshot import finish_cache, restore_cache, snapshot_cache
from cluster.scheduler.replay.scheduler_state import State
from cluster.scheduler.replay.snapshot import restore, snapshot
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from tests.cluster.scheduler.random_life import RandomLife, random_config
from worker.protocol import PageCopy

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(State).decode


class Twins:
    """Two schedulers that are told the same; now and then one is made anew from the other."""

    def __init__(self, config: SchedulerConfig, random: Random) -> None:
        self._config = config
        self._random = random
        self._pair = [Scheduler(config), Scheduler(config)]
        self.num_restored = 0
        self.met: set[str] = set()  # what was there when a snapshot was taken

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls = [partial(getattr(one, name), **options) for one in self._pair]
            answers = [_answer(one, arguments) for one in calls]
            assert encode(answers[0]) == encode(answers[1]), f"{name} differs"
            states = [encode(snapshot(one)) for one in self._pair]
            assert states[0] == states[1], f"the states differ after {name}"
            if self._random.random() < 0.3:
                self._restore_one(states[0])
            kind, value = answers[0]
            if kind == "raised":
                raise TopworkError(value)
            return value

        return call

    def _restore_one(self, encoded: bytes) -> None:
        state = decode(encoded)
        self._pair[self._random.randint(0, 1)] = restore(self._config, state)
        self.num_restored += 1
        signs = {
            "in flight": len(state.in_flight) == 1,
            "ahead": len(state.in_flight) == 2,
            "ending": state.ending,
            "failed": any(one.is_failed for one in state.running),
            "untold": state.untold,
            "evicted": state.evicted,
            "drain": state.drain is not None,
            "line": state.line,
            "loads": state.loads,
            "fenced": state.fenced,
            "pinned": state.pinned,
            "host": any(node.is_on_host for node in state.cache.nodes),
            "run in parts": any(node.continues for node in state.cache.nodes),
            "duplicates": any(one.duplicates for one in state.running),
            "held": any(one.status == "held" for one in state.sequences),
            "preempted": any(one.status == "waiting" and one.output for one in state.sequences),
            "counter": any(flow.counter for flow in state.flows),
            "late": state.counters.num_late,
        }
        self.met.update(name for name, is_met in signs.items() if is_met)


def _answer(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "returned", call(*arguments)
    except TopworkError as error:
        return "raised", str(error)


def _live(seed: int, num_acts: int) -> Twins:
    random = Random(seed)
    config = random_config(random)
    engine = FakeEngine(config, loads_at_once=False, plans_ahead=seed % 3 > 0)
    engine.scheduler = twins = Twins(config, random)
    life = RandomLife(engine, config, random)
    for _ in range(num_acts):
        life.act()
    life.finish()
    return twins


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_at_any_moment_a_restored_scheduler_goes_on_alike(seed: int) -> None:
    _live(seed, num_acts=60)


def test_the_lives_above_meet_everything_that_a_snapshot_tells() -> None:
    lives = [_live(seed, num_acts=120) for seed in range(12)]
    assert set.union(*(one.met for one in lives)) == {
        "in flight",
        "ahead",
        "ending",
        "failed",
        "untold",
        "evicted",
        "drain",
        "line",
        "loads",
        "fenced",
        "pinned",
        "host",
        "run in parts",
        "duplicates",
        "held",
        "preempted",
        "counter",
        "late",
    }


def test_what_an_adapter_claims_that_nobody_asks_for_is_kept() -> None:
    config = tiny_config(adapter_memory=6)
    engine = FakeEngine(config)
    engine.add((1, 2, 3), 1, "D", adapter_bytes=4)
    engine.run()
    for scheduler in (engine.scheduler, restore(config, snapshot(engine.scheduler))):
        with pytest.raises(Conflict, match="too little for the other adapters"):
            scheduler.pin("C", 3)


def test_copies_that_no_plan_has_told_are_kept() -> None:
    cache = PrefixCache(2, 2)
    root = cache.lock(cache.match(namespace("model", BASE, ""), []), 1)
    end, _ = cache.insert(root, [(1, 2), (3, 4)], cache.allocate(2), 1)
    cache.unlock(end, 1)
    cache.pool.free(cache.allocate(1))
    state, _ = snapshot_cache(cache)
    assert state.copies == (PageCopy("save", 1, 0, 2),)
    other = PrefixCache(2, 2)
    finish_cache(other, restore_cache(other, state, 2), [])
    other.check([])
    assert other.take_copies() == state.copies
    assert other.num_saved == 1


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(st.integers(0, 2**32))
def test_at_any_moment_of_many_lives(seed: int) -> None:
    _live(seed, num_acts=120)
