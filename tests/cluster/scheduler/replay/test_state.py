"""A scheduler restored from its state goes on exactly as the one that it was taken of."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import Conflict, TopworkError
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.replay.state import ENUM, RECORD, decode_state, encode_state
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.sequence import Status
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from tests.cluster.scheduler.random_life import RandomLife, random_config, with_ends
from tests.random_cases import is_whole, num_cases

encode = msgspec.msgpack.Encoder().encode


RESTORED = 0.3 if is_whole() else 0.1  # of all moments: to restore one takes 10 ms


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
            if self._random.random() < RESTORED:
                self._restore_one()
            kind, value = answers[0]
            if kind == "raised":
                raise TopworkError(value)
            return value

        return call

    def _restore_one(self) -> None:
        scheduler = self._pair[0]
        self._pair[self._random.randint(0, 1)] = decode_state(encode_state(scheduler))
        self.num_restored += 1
        running = scheduler._running.all()
        trees = list(scheduler._cache._trees)
        nodes = [node for tree in trees for node in tree.nodes()]
        sequences = scheduler._sequences.values()
        peers = scheduler._fairness._classes.values()
        flows = [f for one in peers for s in one.by_key.values() for f in s.flows.by_key.values()]
        signs = {
            "in flight": len(scheduler._in_flight) == 1,
            "ahead": len(scheduler._in_flight) == 2,
            "ending": any(one.is_ending for one in running),
            "failed": any(one.is_failed for one in running),
            "left": scheduler._running._left,
            "evicted": scheduler._slot_policy.evicted,
            "drain": scheduler._slot_policy._drain is not None,
            "slot queue": scheduler._slot_queue.upcoming,
            "loads": scheduler._slot_policy._loads,
            "fenced": scheduler._unloads.fenced,
            "pinned": scheduler._slots.num_pinned,
            "host": any(node.is_on_host for node in nodes),
            "run in parts": any(node.start for node in nodes),
            "duplicates": any(one.duplicates for one in running),
            "held": any(one.status is Status.HELD for one in sequences),
            "preempted": any(
                one.status is Status.WAITING and len(one.tokens) > one.num_prompt_tokens
                for one in sequences
            ),
            "counter": any(flow.counter for flow in flows),
            "late": scheduler.stats().counters.late_slots,
            "window": any(one.window_pages for one in running),
            "checkpoint": any(node.run.checkpoints for node in nodes),
            "host checkpoint": any(c.is_on_host for node in nodes for c in node.run.checkpoints),
            "state": any(one.kept_states for one in running),
        }
        self.met.update(name for name, is_met in signs.items() if is_met)


def _answer(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "returned", call(*arguments)
    except TopworkError as error:
        return "raised", str(error)


def _live(seed: int, num_acts: int, *, has_ends: bool) -> Twins:
    random = Random(seed)
    config = random_config(random)
    if has_ends:
        config = with_ends(config, random)
    engine = FakeEngine(config, loads_at_once=False, plans_ahead=seed % 3 > 0)
    engine.scheduler = twins = Twins(config, random)
    life = RandomLife(engine, config, random)
    for _ in range(num_acts):
        life.act()
    life.finish()
    return twins


@settings(max_examples=num_cases(30), deadline=None)
@given(st.integers(0, 2**32))
def test_at_any_moment_a_restored_scheduler_goes_on_alike(seed: int) -> None:
    _live(seed, num_acts=60, has_ends=seed % 2 == 1)


def test_the_lives_above_meet_everything_that_a_state_may_hold() -> None:
    lives = [
        _live(seed, num_acts=120, has_ends=has_ends)
        for seed in range(1, 6)
        for has_ends in (False, True)
    ]
    assert set.union(*(one.met for one in lives)) == {
        "in flight",
        "ahead",
        "ending",
        "failed",
        "left",
        "evicted",
        "drain",
        "slot queue",
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
        "window",
        "checkpoint",
        "host checkpoint",
        "state",
    }


def test_what_an_adapter_claims_that_nobody_asks_for_is_kept() -> None:
    config = tiny_config(adapter_memory=6)
    engine = FakeEngine(config)
    engine.add((1, 2, 3), 1, "D", adapter_bytes=4)
    engine.run()
    for scheduler in (engine.scheduler, decode_state(encode_state(engine.scheduler))):
        with pytest.raises(Conflict, match="too little for the other adapters"):
            scheduler.pin("C", 3)


def test_a_state_is_restored_without_journal_and_observer() -> None:
    restored = decode_state(encode_state(Scheduler(tiny_config())))
    assert restored._journal is None


@pytest.mark.parametrize(
    "row",
    [
        ("os", "system"),
        ("cluster.scheduler.replay.state", "import_module"),
        ("cluster.scheduler.testing.fake_engine", "FakeEngine"),
        ("cluster.adapters.catalog", "AdapterCatalog"),
    ],
)
def test_a_state_makes_no_objects_but_a_schedulers(row: tuple[str, str]) -> None:
    table = [[(*row, [])], [(8, [0])], 0]
    with pytest.raises(ValueError, match="is no"):
        decode_state(encode(table))


@pytest.mark.parametrize("kind", [ENUM, RECORD])
def test_no_class_is_called_with_what_a_state_says(kind: int) -> None:
    table = [
        [("cluster.scheduler.kv_cache.page_pool", "PagePool", ["num_pages"])],
        [(kind, [0, 2**62])],
        0,
    ]
    with pytest.raises(ValueError, match="PagePool is no value of kind"):
        decode_state(encode(table))


def test_a_state_whose_pages_do_not_exist_is_refused() -> None:
    scheduler = Scheduler(tiny_config())
    scheduler._cache.pool.num_pages = 2**62
    with pytest.raises(AssertionError, match="pages appear or vanish"):
        decode_state(encode_state(scheduler))


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(st.integers(0, 2**32))
def test_at_any_moment_of_many_lives(seed: int) -> None:
    _live(seed, num_acts=120)
