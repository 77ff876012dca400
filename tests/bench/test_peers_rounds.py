"""Whoever is measured is asked in turn, and what they are asked is what the tables say."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.bench.http_target import BenchError
from deploy.bench.workload import Run, Sample, Workload
from tests.bench.peers.cells import (
    MEMORY,
    PREFIX_LEN,
    PROMPT_SPEED,
    Amount,
    LoadCell,
    MemoryCell,
    PrefillCell,
    PrefixCell,
    What,
)
from tests.bench.peers.environments import InstallError
from tests.bench.peers.install import Peer
from tests.bench.peers.rounds import ONE_ROUND, ONE_WAVE, Stage, measure_stage
from tests.bench.peers.servers import Setup
from tests.bench.peers.stages import (
    ENGINE,
    IN_BFLOAT16,
    ONE_RANK,
    OURS,
    OURS_PLAIN,
    adapter_cells,
    make_stages,
)
from tests.bench.peers.target import Opener, Target
from tests.bench.process_tree import ProcessTree

AMOUNT = Amount(waves=2, vocab_size=1000)
SETUP = Setup(model_dir=Path("model"), adapters={}, tp=1, rank_threads=1)


class FakeTree(ProcessTree):
    """Notes when it sleeps."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def pause(self) -> None:
        self._events.append(f"{self._name} sleeps")

    def resume(self) -> None:
        self._events.append(f"{self._name} wakes")

    def memory_bytes(self) -> int:
        return 3 * 2**20


def opener(name: str, events: list[str], fault: str | None = None) -> Opener:
    def answer(workload: Workload, round_number: int) -> Run:
        events.append(f"{name}: {len(workload.asks(round_number))} in round {round_number}")
        if fault is not None:
            raise BenchError(fault)
        return Run(tuple(Sample(0.0, (1.0, 2.0)) for _ in workload.asks(round_number)))

    @contextmanager
    def opened() -> Iterator[Target]:
        if name == "absent":
            raise InstallError("no compiler")
        yield Target(name, FakeTree(name, events), answer)
        events.append(f"{name} ends")

    return Opener(name, opened)


def load(name: str = "c", concurrency: int = 3, **changes: frozenset[str]) -> LoadCell:
    return LoadCell(what=What.BASE, name=name, models=("m",), concurrency=concurrency, **changes)


def test_targets_take_turns_and_sleep_while_others_are_asked() -> None:
    events: list[str] = []
    stage = Stage(openers=(opener("a", events), opener("b", events)), cells=(load(),), threads=1)
    rows = measure_stage(stage, 1, AMOUNT, lambda _: None)
    assert [(r.target, len(r.rounds), r.fault) for r in rows] == [("a", 1, None), ("b", 1, None)]
    assert events == [
        *("a sleeps", "b sleeps"),
        *("a wakes", "a: 3 in round 0", "a sleeps", "b wakes", "b: 3 in round 0", "b sleeps"),
        *("b wakes", "b: 6 in round 1", "b sleeps", "a wakes", "a: 6 in round 1", "a sleeps"),
        *("b wakes", "b ends", "a wakes", "a ends"),
    ]


def test_one_that_fails_or_cannot_start_stops_nobody_else() -> None:
    events: list[str] = []
    openers = (opener("a", events), opener("bad", events, "500: oh"), opener("absent", events))
    rows = measure_stage(
        Stage(openers=openers, cells=(load(),), threads=1), 2, AMOUNT, lambda _: None
    )
    by_target = {r.target: r for r in rows}
    assert len(by_target["a"].rounds) == 2
    assert by_target["bad"].fault == "BenchError: 500: oh"
    assert by_target["absent"].fault == "cannot start: no compiler"
    assert sum(event.startswith("bad:") for event in events) == 1


@pytest.mark.parametrize(
    ("seconds", "asked"),
    [(ONE_WAVE, [3, 6, 6]), (ONE_WAVE + 1, [3, 3, 3]), (ONE_ROUND + 1, [3, 3])],
)
def test_a_slow_one_is_asked_one_wave_and_a_very_slow_one_in_one_round(
    seconds: float, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([0.0, seconds, *range(1000, 1010)])
    monkeypatch.setattr("tests.bench.peers.rounds.time.perf_counter", lambda: next(ticks))
    events: list[str] = []
    stage = Stage(openers=(opener("a", events),), cells=(load(),), threads=1)
    (only,) = measure_stage(stage, 2, AMOUNT, lambda _: None)
    assert len(only.rounds) == len(asked) - 1
    assert [e for e in events if ":" in e] == [
        f"a: {count} in round {number}" for number, count in enumerate(asked)
    ]


def test_a_cell_may_be_for_one_target_only_and_memory_is_looked_at_once_in_the_last_round() -> None:
    events: list[str] = []
    memory = MemoryCell(load=load("eight"))
    cells = (load(only=frozenset({"a"})), memory)
    stage = Stage(openers=(opener("a", events), opener("b", events)), cells=cells, threads=1)
    rows = measure_stage(stage, 2, AMOUNT, lambda _: None)
    assert [(r.target, r.cell, len(r.rounds)) for r in rows] == [
        ("a", "c", 2),
        ("a", "eight", 1),
        ("b", "eight", 1),
    ]
    assert rows[2].rounds == [{MEMORY: 3.0}]


def test_a_number_of_requests_holds_for_every_cell_and_else_every_client_and_model_is_busy() -> (
    None
):
    assert [AMOUNT.requests(c, m) for c, m in ((1, 1), (1, 8), (8, 4), (16, 8))] == [4, 8, 16, 32]
    assert Amount(waves=2, num_requests=2, vocab_size=9).requests(16, 8) == 2


def test_a_warm_prefix_was_asked_before_but_no_prompt_twice() -> None:
    cold, warm = PrefixCell(models=("a", "b")).workloads(AMOUNT)
    first, others = cold.asks(1), warm.asks(1)
    known = {(ask.model, ask.token_ids[:PREFIX_LEN]) for ask in first}
    assert len(known) == len(first) == 2
    assert {(ask.model, ask.token_ids[:PREFIX_LEN]) for ask in others} == known
    assert len({ask.token_ids for ask in first + others}) == len(first + others) == 10


def test_prefill_speed_is_prompt_tokens_over_the_time_to_the_first_token() -> None:
    def answer(workload: Workload, round_number: int) -> Run:
        (ask,) = workload.asks(round_number)
        assert (len(ask.token_ids), ask.num_output_tokens) == (4096, 1)
        return Run((Sample(5.0, (7.0,)),))

    target = Target("a", FakeTree("a", []), answer)
    assert PrefillCell(base="m").measure(target, 1, AMOUNT)[PROMPT_SPEED] == 2048.0


def test_each_llama_serves_weights_of_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, str]] = []

    def no_model(model_dir: Path, weights: str) -> Path:
        asked.append((model_dir, weights))
        raise InstallError("not converted")

    monkeypatch.setattr("tests.bench.peers.servers.gguf_model", no_model)
    (stage,) = make_stages({What.BASE}, Peer, [1], SETUP)
    for opener in stage.openers:
        if opener.name.startswith("llama"):
            with pytest.raises(InstallError):
                opener.open()
    formats = ("bf16", "q8_0", "q4_0", "q4_k_m")
    assert asked == [(SETUP.model_dir, weights) for weights in formats]


def test_what_is_wanted_decides_who_is_started() -> None:
    def names(wanted: set[What], peers: list[Peer], threads: list[int]) -> list[tuple[str, ...]]:
        stages = make_stages(wanted, peers, threads, SETUP)
        return [tuple(opener.name for opener in stage.openers) for stage in stages]

    both = [Peer.VLLM, Peer.LLAMA]
    assert names({What.BASE}, both, [1, 2]) == [(OURS, "vllm", "llama")] * 2
    assert names({What.UNUSED}, both, [1, 2]) == [(OURS, OURS_PLAIN)]
    assert names({What.RANKS}, both, [1, 2]) == [(OURS, ONE_RANK)]
    assert names({What.OVERHEAD, What.MEMORY}, both, [1]) == [
        (OURS, "vllm", "llama"),
        (OURS, ENGINE),
    ]
    llamas = [Peer.LLAMA, Peer.LLAMA_Q8_0, Peer.LLAMA_Q4_0]
    assert names({What.BASE, What.PREFILL, What.ADAPTERS}, llamas, [2]) == [
        (OURS, "llama", "llama-q8_0", "llama-q4_0"),
        (OURS, "llama"),
        (OURS, "llama"),
    ]
    in_4 = replace(SETUP, quantization="int4")
    stages = make_stages({What.BASE, What.PREFILL}, llamas, [2], in_4)
    assert [tuple(opener.name for opener in stage.openers) for stage in stages] == [
        (OURS, IN_BFLOAT16, "llama", "llama-q8_0", "llama-q4_0"),
        (OURS, IN_BFLOAT16, "llama-q4_0"),
    ]
    cells = adapter_cells({What.MEMORY, What.ADAPTERS, What.PREFIX})
    assert [cell.what for cell in cells[-2:]] == [What.PREFIX, What.MEMORY]
    assert len(cells) == 3 * 4 + 2
