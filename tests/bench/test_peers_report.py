"""Ratios are to the best peer, goals have their directions, and the report fits a pipe."""

import json
import re
from io import StringIO

import pytest
import typer
from rich.console import Console

from tests.bench.peers.__main__ import WIDTH, parse_names, parse_threads
from tests.bench.peers.cells import (
    ITL_P99,
    MEMORY,
    PROMPT_SPEED,
    SPEED,
    WARM,
    Figures,
    What,
)
from tests.bench.peers.goals import Goal, check_goals, worst_ratio
from tests.bench.peers.install import Peer, peers_of
from tests.bench.peers.report import Results, as_json, print_all
from tests.bench.peers.rounds import Row
from tests.bench.peers.stages import ENGINE, IN_BFLOAT16, ONE_RANK, OURS, OURS_PLAIN, at


def test_names_between_commas_are_read_once_each_and_an_empty_text_means_all() -> None:
    assert parse_names("prefix, base,prefix", What) == [What.PREFIX, What.BASE]
    assert parse_names("", Peer) == list(Peer)
    wanted = "llama,llama-q8_0,llama-q4_0"
    assert parse_names(wanted, Peer) == [Peer.LLAMA, Peer.LLAMA_Q8_0, Peer.LLAMA_Q4_0]
    with pytest.raises(typer.BadParameter, match="'sglang' is none of vllm, llama, llama-q8_0, "):
        parse_names("vllm,sglang", Peer)


def test_numbers_of_threads_are_positive_and_at_least_one() -> None:
    assert parse_threads("2, 1,2") == [2, 1]
    for text in ("", "0", "1,", "a", "-1", "1.5"):
        with pytest.raises(typer.BadParameter, match="is not of the form"):
            parse_threads(text)


def row(
    what: What, target: str, figures: Figures, cell: str = "8 concurrent", threads: int = 1
) -> Row:
    return Row(what, cell, target, threads, [figures])


def goal_of(rows: list[Row], name: str, over: str | None = None, weight_bits: int = 16) -> Goal:
    found = [
        goal
        for goal in check_goals(rows, weight_bits)
        if goal.name == name and (over is None or (goal.measured and goal.measured.over == over))
    ]
    assert len(found) == 1, found
    return found[0]


def shown(rows: list[Row], weight_bits: int = 16) -> str:
    console = Console(file=StringIO(), width=WIDTH)
    print_all(Results({"machine": "two cores"}, rows, weight_bits), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_ratio_is_to_the_best_peer_with_its_best_number_of_threads_in_the_same_pass() -> None:
    rows = [
        row(What.BASE, OURS, {SPEED: 100.0}),
        row(What.BASE, "vllm", {SPEED: 50.0}),
        row(What.BASE, "llama", {SPEED: 80.0}),
        row(What.BASE, OURS, {SPEED: 150.0}, threads=2),  # the machine was quieter
        row(What.BASE, "vllm", {SPEED: 100.0}, threads=2),
        row(What.BASE, "llama", {SPEED: 60.0}, threads=2),
        row(What.BASE, "peft", {SPEED: 1e9}, cell="1 concurrent"),
        row(What.UNUSED, "peft", {SPEED: 1e9}),
    ]
    over = peers_of(16)
    ratio = worst_ratio(rows, What.BASE, "8 concurrent", SPEED, over=over)
    assert ratio is not None
    assert (ratio.value, ratio.over) == (1.25, "llama, 1 thread")
    less = worst_ratio(rows, What.BASE, "8 concurrent", SPEED, over=over, less_is_better=True)
    assert less is not None and less.value == 2.5


def test_medians_are_over_rounds() -> None:
    one = Row(What.BASE, "c", OURS, 1, [{SPEED: 3.0}, {SPEED: 1.0}, {SPEED: 9.0}])
    assert one.median(SPEED) == 3.0
    assert Row(What.BASE, "c", OURS, 1).median(SPEED) is None


@pytest.mark.parametrize(("speed", "is_met"), [(110.0, True), (109.0, False)])
def test_base_wants_a_tenth_more_than_the_best_peer(speed: float, is_met: bool) -> None:
    rows = [row(What.BASE, OURS, {SPEED: speed}), row(What.BASE, "vllm", {SPEED: 100.0})]
    goal = goal_of(rows, "tok/s, 8 concurrent")
    assert (goal.limit, goal.is_met) == (1.1, is_met)
    assert goal_of(rows, "tok/s, 1 concurrent").is_met is None


def test_goals_are_over_peers_whose_weights_have_as_many_bits() -> None:
    rows = [
        row(What.BASE, OURS, {SPEED: 110.0}),
        row(What.BASE, "llama", {SPEED: 100.0}),
        row(What.BASE, "llama-q8_0", {SPEED: 150.0}),
        row(What.BASE, "llama-q4_0", {SPEED: 200.0}),
    ]
    goal = goal_of(rows, "tok/s, 8 concurrent")
    assert goal.measured is not None and goal.measured.over == "llama, 1 thread"
    assert goal.is_met is True
    assert goal_of([rows[0], *rows[2:]], "tok/s, 8 concurrent").is_met is None
    in_4 = goal_of(rows, "tok/s, 8 concurrent", weight_bits=4)
    assert in_4.measured is not None and in_4.measured.over == "llama-q4_0, 1 thread"
    assert (in_4.limit, in_4.is_met) == (2.0, False)


def test_in_fewer_bits_we_are_held_against_our_own_16_too() -> None:
    base, memory = at("base", 8), at("eight mixed", 8)
    rows = [
        row(What.BASE, OURS, {SPEED: 150.0}),
        row(What.BASE, IN_BFLOAT16, {SPEED: 100.0}),
        row(What.PREFILL, OURS, {PROMPT_SPEED: 110.0}, "prompt"),
        row(What.PREFILL, IN_BFLOAT16, {PROMPT_SPEED: 100.0}, "prompt"),
        *(row(What.MEMORY, OURS, {MEMORY: 50.0}, cell) for cell in (base, memory)),
        *(row(What.MEMORY, IN_BFLOAT16, {MEMORY: 100.0}, cell) for cell in (base, memory)),
        row(What.ADAPTERS, OURS, {SPEED: 84.0}, "eight mixed, 8 concurrent"),
        row(What.ADAPTERS, OURS, {SPEED: 100.0}, "own base, 8 concurrent"),
    ]
    own = "own base"
    mixed = goal_of(rows, "tok/s, eight mixed, 8 concurrent", own, weight_bits=8)
    assert (mixed.limit, mixed.is_met) == (0.85, False)
    assert goal_of(rows, "tok/s, eight mixed, 8 concurrent", own).is_met is True
    over = [
        {
            (goal.name, goal.is_met)
            for goal in check_goals(rows, bits)
            if goal.measured is not None and goal.measured.over == IN_BFLOAT16
        }
        for bits in (16, 8, 4)
    ]
    assert over == [
        set(),
        {("tok/s, 8 concurrent", True), ("prompt tok/s, prompt", False)},
        {("peak, base, 8 concurrent", False)},
    ]


def test_the_table_names_other_bits_beside_their_own_ratio() -> None:
    rows = [
        row(What.BASE, OURS, {SPEED: 100.0}),
        row(What.BASE, "llama", {SPEED: 80.0}),
        row(What.BASE, "llama-q8_0", {SPEED: 160.0}),
        row(What.BASE, "llama-q4_0", {SPEED: 400.0}),
    ]
    table, _, _ = shown(rows).partition("goals; ")
    ratios = dict(re.findall(r"8 concurrent +(\S.*?)  .* ([\d.]+) *$", table, re.MULTILINE))
    assert ratios == {
        "topwork": "1.00",
        "llama": "1.25",
        "llama-q8_0, 8 bits, ours 16": "0.62",
        "llama-q4_0, 4 bits, ours 16": "0.25",
    }
    table, _, _ = shown([*rows, row(What.BASE, IN_BFLOAT16, {SPEED: 50.0})], 8).partition("goals; ")
    ratios = dict(re.findall(r"8 concurrent +(\S.*?)  .* ([\d.]+) *$", table, re.MULTILINE))
    assert ratios["llama-q8_0"] == "0.62"
    assert ratios["llama, 16 bits, ours 8"] == "1.25"
    assert ratios[IN_BFLOAT16] == "2.00"


def test_adapters_are_held_against_our_own_base_and_mixed_ones_against_the_best_peer() -> None:
    rows = [
        row(What.ADAPTERS, OURS, {SPEED: 100.0}, "own base, 8 concurrent"),
        row(What.ADAPTERS, OURS, {SPEED: 70.0}, "one adapter, 8 concurrent"),
        row(What.ADAPTERS, "llama", {SPEED: 69.0}, "one adapter, 8 concurrent"),
        row(What.ADAPTERS, OURS, {SPEED: 90.0}, "four mixed, 8 concurrent"),
        row(What.ADAPTERS, "vllm", {SPEED: 10.0}, "four mixed, 8 concurrent"),
        row(What.ADAPTERS, "peft", {SPEED: 25.0}, "four mixed, 8 concurrent"),
    ]
    one = goal_of(rows, "tok/s, one adapter, 8 concurrent")
    assert one.measured is not None and one.measured.over == "own base"
    assert (one.measured.value, one.is_met) == (0.7, False)
    assert goal_of(rows, "tok/s, four mixed, 8 concurrent", "own base").is_met is True
    peer = goal_of(rows, "tok/s, four mixed, 8 concurrent", "peft, 1 thread")
    assert peer.measured is not None and peer.measured.value == 3.6
    assert peer.is_met is True


def test_other_goals_have_their_directions() -> None:
    cell = "8 concurrent"
    rows = [
        row(What.UNUSED, OURS, {SPEED: 98.0}),
        row(What.UNUSED, OURS_PLAIN, {SPEED: 100.0}),
        row(What.PREFIX, OURS, {WARM: 100.0, SPEED: 30.0}, "prefix"),
        row(What.PREFIX, "vllm", {WARM: 160.0, SPEED: 21.0}, "prefix"),
        row(What.PREFIX, "llama", {WARM: 400.0, SPEED: 1.0}, "prefix"),
        row(What.PREFILL, OURS, {PROMPT_SPEED: 90.0}, "prompt"),
        row(What.PREFILL, "peft", {PROMPT_SPEED: 100.0}, "prompt"),
        row(What.MEMORY, OURS, {MEMORY: 59.0}, cell),
        row(What.MEMORY, "vllm", {MEMORY: 100.0}, cell),
        row(What.MEMORY, "llama", {MEMORY: 10.0}, cell),
        row(What.OVERHEAD, OURS, {SPEED: 92.0, ITL_P99: 132.0}, cell),
        row(What.OVERHEAD, ENGINE, {SPEED: 100.0, ITL_P99: 100.0}, cell),
        row(What.RANKS, OURS, {SPEED: 131.0}, cell),
        row(What.RANKS, ONE_RANK, {SPEED: 100.0}, cell),
    ]
    told = {
        (goal.what.value, goal.name): (round(goal.measured.value, 6), goal.is_met)
        for goal in check_goals(rows)
        if goal.measured is not None
    }
    assert told == {
        ("unused", "tok/s, 8 concurrent"): (0.98, False),
        ("prefix", "warm TTFT p50, times sooner"): (1.6, True),
        ("prefix", "tok/s"): (round(30 / 21, 6), False),
        ("prefill", "prompt tok/s, prompt"): (0.9, True),
        ("memory", "peak, 8 concurrent"): (0.59, True),
        ("overhead", "tok/s, 8 concurrent"): (0.92, True),
        ("overhead", "ITL p99, 8 concurrent"): (1.32, False),
        ("ranks", "tok/s, 8 concurrent"): (1.31, True),
    }


def test_the_report_fits_a_pipe_and_says_what_is_missing_and_why() -> None:
    failed = row(What.BASE, "vllm", {})
    failed.rounds, failed.fault = [], "BenchError: vllm has ended; [log] ends: no memory"
    rows = [row(What.BASE, OURS, {SPEED: 110.0}), row(What.BASE, "llama", {SPEED: 100.0}), failed]
    text = shown(rows)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "1.10" in text and "met" in text and "not measured" in text
    assert "0, failed" in text and "vllm has ended; [log] ends: no memory" in text
    assert "machine: two cores" in text
    written = json.loads(json.dumps(as_json(Results({}, rows))))
    assert [r["target"] for r in written["rows"]] == [OURS, "llama", "vllm"]
    assert written["goals"][1]["is_met"] is True
