"""The scheduler benchmark measures what it says, and says all that it measured."""

import json
import os
import sys
from dataclasses import replace
from io import StringIO
from typing import Any, get_args

import pytest
from rich.console import Console

from cluster.kv_events import KvEventBuffer
from tests.bench.scheduler.cases import BATCH, Case, Kind, prepare
from tests.bench.scheduler.core import CoreSizes, Sample
from tests.bench.scheduler.goals import check_goals
from tests.bench.scheduler.our_core import OurCore
from tests.bench.scheduler.profile import print_profile
from tests.bench.scheduler.report import as_json, print_beside, print_goals, print_growth
from tests.bench.scheduler.rounds import Row, Sizes, measure_beside, measure_growth, spread
from tests.bench.scheduler.side import OURS, PEER, ChildSide, LocalSide

TINY = Sizes(
    batches=(1, 3),
    prompts=(32, 80),
    contexts=(16, 64),
    cached_pages=(600, 1_000),
    adapters=(8, 20),
    blocked=(0, 640),
    steps=4,
    requests=3,
)


def shown(rows: list[Row], families: list[list[Row]]) -> str:
    console = Console(file=StringIO(), width=200)
    print_beside(rows, console)
    print_growth(families, console)
    print_goals(check_goals(rows, families), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_every_case_is_measured_in_every_round_and_shown() -> None:
    told: list[None] = []

    def tell() -> None:
        told.append(None)

    rows = measure_beside(TINY, (OURS,), LocalSide, 1, tell)
    families = measure_growth(TINY, LocalSide, 1, tell)
    every = rows + [row for family in families for row in family]
    names = [row.case.name for row in every]
    assert len(set(names)) == len(names) == 2 + 3 * 2 + 6 * 2
    assert len(told) == 2 * len(every)  # one round, and one that does not count
    assert all(len(row.samples[OURS]) == 1 for row in every)
    assert all(sample.calls > 0 for row in every for sample in row.samples[OURS])
    text = shown(rows, families)
    assert all(name in text for name in names)
    written = json.loads(json.dumps(as_json(every, check_goals(rows, families), {})))
    assert [row["name"] for row in written["rows"]] == names


def test_a_peer_is_shown_beside_ours_and_compared_round_by_round() -> None:
    row = Row(Case("decode", 64, 1))
    row.samples[OURS] = [Sample(0, us, 0, 1, us) for us in (10.0, 40.0, 20.0)]
    row.samples[PEER] = [Sample(0, us, 0, 1, us) for us in (5.0, 10.0, 10.0)]
    goal = check_goals([row], [])[0]
    assert (goal.measured, goal.is_met) == (2.0, False)
    assert "theirs" in shown([row], [])


def test_a_request_that_finds_what_it_should_not_stops_the_run() -> None:
    class Forgetful(OurCore):
        def step(self) -> int:
            return 0 * super().step()

    with pytest.raises(AssertionError, match="not a hit"):
        prepare(Case("hit", 64, 1), Forgetful)()


def test_our_side_ends_requests_after_their_tokens_and_counts_the_time_of_each_call() -> None:
    core = OurCore(CoreSizes(num_pages=8, max_running=2))
    core.add("a", [1] * 20, 2)
    core.step()
    assert core.num_active == 1
    core.step()
    assert core.num_active == 0
    assert min(core.spent.add, core.spent.plan, core.spent.commit, core.spent.handover) > 0


def test_a_side_in_a_process_of_its_own_answers_the_same_kind_of_sample() -> None:
    side = ChildSide(OURS, sys.executable, max(os.sched_getaffinity(0)))
    try:
        assert side.measure(Case("miss", 32, 1)).calls > 0
    finally:
        side.close()


def test_our_side_has_the_observer_that_a_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    stored, take = KvEventBuffer.stored, KvEventBuffer.take_batches

    def store_and_note(buffer: KvEventBuffer, *change: Any) -> None:
        told.append(len(change[2]))
        stored(buffer, *change)

    def take_and_note(buffer: KvEventBuffer) -> Any:
        told.append(-sum(told))
        return take(buffer)

    monkeypatch.setattr(KvEventBuffer, "stored", store_and_note)
    monkeypatch.setattr(KvEventBuffer, "take_batches", take_and_note)
    prepare(Case("miss", 32, 1), OurCore)()
    assert max(told) > 0 and sum(told) == 0, "pages were reported, and none is left in the buffer"


def test_a_prompt_that_is_not_blocked_stops_the_run() -> None:
    def open_core(sizes: CoreSizes) -> OurCore:
        return OurCore(replace(sizes, num_pages=2 * sizes.num_pages, max_running=BATCH + 1))

    for kind in get_args(Kind)[-2:]:
        prepare(Case(kind, 640, 4), OurCore)()
        with pytest.raises(AssertionError, match="not blocked"):
            prepare(Case(kind, 640, 4), open_core)()


def test_the_profile_names_the_modules() -> None:
    console = Console(file=StringIO(), width=200)
    print_profile(console, (Case("decode", 2, 3),))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "planner" in text and "update_from_output" in text and "collector" in text


def test_quartiles_of_one_round_are_that_round() -> None:
    one, three = spread([3.0]), spread([1.0, 2.0, 9.0])
    assert (one.low, one.median, one.high) == (3.0, 3.0, 3.0)
    assert (three.low, three.median, three.high) == (1.5, 2.0, 5.5)
