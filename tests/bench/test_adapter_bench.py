"""The adapter benchmark asks the same of everyone, and its figures are what they say."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from deploy.bench.http_target import BenchError, token_times
from deploy.bench.workload import Ask
from deploy.demo.many_adapters import make_many
from deploy.demo.model import DEFAULT_TARGET
from tests.bench.adapters.cold import TIERS, Place
from tests.bench.adapters.counts import count_tiers, read_counts
from tests.bench.adapters.directories import (
    NUM_KINDS,
    adapter_names,
    drop_from_page_cache,
    mean_shard_bytes,
)
from tests.bench.adapters.many import FEW, ManyOptions, Round, Row, Start, workload
from tests.bench.adapters.parts import Part
from tests.bench.adapters.popularity import by_zipf, in_turn
from tests.bench.adapters.report import Results, as_json, check_goals, print_all
from tests.bench.adapters.server import cpu_used, plain_text
from tests.bench.adapters.stall import ALONE, COLD, LOADS, WARM, Phase
from tests.bench.adapters.streams import Streams, Window, gaps_within, watch
from tests.bench.adapters.traffic import Burst, Call, send_burst
from worker.model_config_reader import read_model_config

OPTIONS = ManyOptions(names=adapter_names(40), vocab_size=1000, rounds=1, num_requests=100)


def test_zipf_draws_are_the_same_on_every_machine_and_others_with_another_seed() -> None:
    assert by_zipf(2000, 12, exponent=1.1, seed="a") == (
        2,
        0,
        32,
        48,
        1,
        30,
        23,
        1383,
        481,
        0,
        2,
        31,
    )
    assert by_zipf(2000, 50, exponent=1.1, seed="a") != by_zipf(2000, 50, exponent=1.1, seed="b")


def test_zipf_draws_have_the_shape_of_the_law() -> None:
    draws = Counter(by_zipf(2000, 100_000, exponent=1.1, seed="shape"))
    total = sum((i + 1) ** -1.1 for i in range(2000))
    for number in (0, 1, 9, 99):
        wanted = 100_000 * (number + 1) ** -1.1 / total
        assert abs(draws[number] - wanted) < 5 * wanted**0.5, number
    assert set(draws) <= set(range(2000))
    assert len(draws) > 1900


def test_an_exponent_of_zero_makes_all_equal() -> None:
    draws = Counter(by_zipf(4, 10_000, exponent=0.0, seed="even"))
    assert all(2200 < draws[number] < 2800 for number in range(4))


def test_adapters_in_turn_go_round() -> None:
    assert in_turn(5, 7, start=3) == (3, 4, 0, 1, 2, 3, 4)


def test_rounds_in_turn_go_on_where_the_last_one_ended_and_few_are_the_same_on_both_servers() -> (
    None
):
    first, second = (workload("in turn", OPTIONS, number).models for number in (0, 1))
    assert first + second == tuple(f"a{i % 40:04d}" for i in range(200))
    assert set(workload("few", OPTIONS, 1).models) == set(adapter_names(FEW))
    assert workload("zipf", OPTIONS, 1).models != workload("zipf", OPTIONS, 2).models


METRICS = """\
# HELP topwork_adapter_loads_total Adapters loaded into a slot.
# TYPE topwork_adapter_loads_total counter
topwork_adapter_loads_total{replica="0"} 12.0
topwork_adapter_loads_total{replica="1"} 3.0
# TYPE topwork_adapter_reads_total counter
topwork_adapter_reads_total{from="disk"} 7.0
topwork_adapter_reads_total{from="host"} 1.0
# TYPE topwork_adapter_slots gauge
topwork_adapter_slots{replica="0"} 16.0
# TYPE topwork_adapter_resident gauge
topwork_adapter_resident{adapter="a",level="device",pinned="false"} 1.0
topwork_adapter_resident{adapter="b \\"{x}\\"",level="disk",pinned="false"} 1.0
topwork_adapter_resident{adapter="c",level="disk",pinned="true"} 1.0
# TYPE topwork_adapter_inflight gauge
topwork_adapter_inflight{adapter="a"} 2.0
# TYPE topwork_requests_total counter
topwork_requests_total{model="m"} 9.0
"""


def test_counters_of_adapters_are_summed_over_replicas_and_kept_apart_by_other_labels() -> None:
    counts = read_counts(METRICS)
    assert counts.totals == {
        "topwork_adapter_loads_total": 15.0,
        'topwork_adapter_reads_total{from="disk"}': 7.0,
        'topwork_adapter_reads_total{from="host"}': 1.0,
    }
    assert counts.loads == 15
    later = read_counts(METRICS.replace("12.0", "20.0"))
    assert later.since(counts)["topwork_adapter_loads_total"] == 8.0


def test_adapters_are_counted_by_tier() -> None:
    entries = [{"name": tier, "tier": tier} for tier in ("disk", "host", "disk")]
    assert count_tiers(entries) == {"disk": 2, "host": 1}


def test_what_a_terminal_shows_has_no_colours_and_no_lines_that_were_redrawn() -> None:
    output = b"\x1b[32mstarting 0:00\x1b[0m\r\x1b[2Kstarting 0:01\r\n\x1b[?25hno such model\r\n"
    assert plain_text(output) == "starting 0:01\nno such model\n"


def test_cpu_time_counts_processes_that_began_meanwhile() -> None:
    assert cpu_used({1: 2.0, 2: 5.0}, {1: 2.5, 3: 0.25}) == 0.75


def test_gaps_count_that_have_a_moment_in_common_with_the_window() -> None:
    times = [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]
    assert gaps_within(times, Window(2.0, 5.0)) == [2.0, 1.0, 2.0]
    assert gaps_within(times, Window(1.0, 3.0)) == [2.0]
    assert gaps_within(times, Window(8.0, 9.0)) == []


def sse(*tokens: int) -> bytes:
    chunk = {"choices": [{"token_ids": list(tokens)}]}
    return f"data: {json.dumps(chunk)}\n\n".encode()


class Answers(httpx.AsyncByteStream):
    """Sends a token at a time, `count` in all, or without end."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self.is_closed = False

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        sent = 0
        while sent != self._count:
            sent += 1
            yield sse(sent)
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        self.is_closed = True


def client_of(*answers: Answers) -> httpx.AsyncClient:
    waiting = iter(answers)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=next(waiting)))
    return httpx.AsyncClient(base_url="http://server", transport=transport)


ASKS = (Ask("a", (1, 2), 9), Ask("b", (3,), 9))


async def test_streams_are_watched_from_their_first_tokens_and_left_afterwards() -> None:
    answers = [Answers(None), Answers(None)]
    begun_after: list[list[int]] = []

    async def meanwhile(streams: Streams) -> Window:
        begun_after.append([len(times) for times in streams.times])
        start = streams.times[0][-1]
        await streams.until(lambda times: len(times) >= 30)
        return Window(start, max(times[-1] for times in streams.times))

    async with client_of(*answers) as client:
        gaps = await watch(client, ASKS, meanwhile, num_first=5)
    assert min(begun_after[0]) >= 5
    assert len(gaps) >= 2 * 20 and min(gaps) >= 0
    assert all(answer.is_closed for answer in answers)


async def test_a_stream_that_ends_while_it_is_watched_stops_the_run() -> None:
    async def forever(streams: Streams) -> Window:
        await streams.until(lambda times: len(times) > 1000)
        raise AssertionError("it ended")

    async with client_of(Answers(None), Answers(7)) as client:
        with pytest.raises(BenchError, match="ended after 7 tokens"):
            await watch(client, ASKS, forever, num_first=2)


async def test_a_failure_of_what_goes_on_meanwhile_stops_the_run() -> None:
    async def fails(streams: Streams) -> Window:
        raise BenchError("no adapter")

    async with client_of(Answers(None), Answers(None)) as client:
        with pytest.raises(BenchError, match="no adapter"):
            await watch(client, ASKS, fails, num_first=2)


async def test_an_answer_that_is_an_error_is_told() -> None:
    refusing = httpx.MockTransport(lambda _: httpx.Response(404, text="no such model"))
    async with httpx.AsyncClient(base_url="http://server", transport=refusing) as client:
        with pytest.raises(BenchError, match="404: no such model"):
            [at async for at in token_times(client, ASKS[0])]


async def test_a_burst_keeps_the_order_and_the_offsets_and_tells_errors() -> None:
    got: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        got.append(json.loads(request.content)["number"])
        return httpx.Response(500 if got[-1] == 2 else 200, text="broken")

    calls = [Call("/x", {"number": number}, offset=0.01 * number) for number in range(4)]
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
        burst, errors = await send_burst(client, calls, clients=1)
    assert got == [0, 1, 2, 3]
    assert errors == ["500: broken"]
    assert all(at >= call.offset for at, call in zip(burst.offsets, calls, strict=True))
    assert burst.ended == max(burst.answered) >= burst.begun


def test_offsets_of_a_burst_count_from_its_beginning() -> None:
    assert Burst(10.0, (10.0, 10.5), (10.2, 11.0)).offsets == (0.0, 0.5)


@pytest.mark.model
def test_shards_take_at_least_their_files_and_more_on_two_ranks(tmp_path: Path) -> None:
    paths = make_many(tmp_path, NUM_KINDS)
    model = read_model_config(DEFAULT_TARGET)
    files = sum((path / "adapter_model.safetensors").stat().st_size for path in paths)
    one, two = (mean_shard_bytes(tmp_path, model, tp) for tp in (1, 2))
    assert 0.95 < one / (files / NUM_KINDS) < 1.05
    assert one < two < 2 * one
    drop_from_page_cache(paths[0])


def test_adapters_that_are_there_stay_and_unfinished_ones_are_made(tmp_path: Path) -> None:
    first = {path: (path / "adapter_model.safetensors") for path in make_many(tmp_path, 3)}
    stamps = [file.stat().st_mtime_ns for file in first.values()]
    contents = [file.read_bytes() for file in first.values()]
    (tmp_path / "a0001" / "adapter_config.json").unlink()
    (tmp_path / "a0001" / "adapter_model.safetensors").write_bytes(b"half of it")
    assert make_many(tmp_path, 3) == list(first)
    assert [file.read_bytes() for file in first.values()] == contents
    after = [file.stat().st_mtime_ns for file in first.values()]
    assert [a == b for a, b in zip(stamps, after, strict=True)] == [True, False, True]
    assert sorted(p.name for p in (tmp_path / "a0001").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def round_of(speed: float, idle: float | None) -> Round:
    return Round(speed, 2.0, 0.1, 0.2, 1.5, 0.25, {"topwork_adapter_loads_total": 4.0}, idle)


def results() -> Results:
    rows = [Row("few", FEW), Row("few", 2000), Row("zipf", 2000)]
    for row, speeds in zip(rows, ((100, 120, 90), (80, 95, 99), (50, 60, 70)), strict=True):
        row.rounds = [round_of(speed, 1.0 if row.workload == "few" else None) for speed in speeds]
        row.tiers = {"device": 16, "disk": 1784}
    gaps = {ALONE: 0.02, COLD: 0.03, WARM: 0.025, LOADS: 0.021}
    phases = [Phase(name, [[gap] * 9, [gap] * 9], [1.0, 2.0], [5, 5]) for name, gap in gaps.items()]
    places = [Place(tier, [0.1 * (i + 1)]) for i, tier in enumerate(TIERS)]
    starts = [Start(FEW, 5.0, 15.0), Start(2000, 6.0, 17.0)]
    return Results({"servers": "tp 1"}, starts, rows, phases, places, [Part("digest", (0.001,))])


def test_goals_are_ratios_of_medians_and_of_percentiles() -> None:
    measured = {
        goal.name: (round(goal.measured, 3), goal.is_met) for goal in check_goals(results())
    }
    assert measured == {
        "start-up with 2,000 adapters, seconds": (17.0, False),
        "tok/s with 2,000 registered over that with 5": (0.95, True),
        "CPU of the idle server, percent of a core": (1.0, True),
        f"p50 between tokens: {COLD} over {WARM}": (1.2, False),
        f"p99 between tokens: {COLD} over {WARM}": (1.2, True),
        f"p50 between tokens: {COLD} over {ALONE}": (1.5, False),
        f"p99 between tokens: {COLD} over {ALONE}": (1.5, True),
        f"p50 between tokens: {LOADS} over {ALONE}": (1.05, True),
        f"p99 between tokens: {LOADS} over {ALONE}": (1.05, True),
    }


def test_everything_measured_is_shown_and_written() -> None:
    console = Console(file=StringIO(), width=180)
    print_all(results(), console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    for wanted in ("start-up", "zipf", COLD, WARM, "never read", "digest", "goals", "tp 1"):
        assert wanted in text, wanted
    written = json.loads(json.dumps(as_json(results())))
    assert [row["workload"] for row in written["rows"]] == ["few", "few", "zipf"]
    assert len(written["phases"][1]["gaps"][0]) == 9
    assert [goal["is_met"] for goal in written["goals"]].count(False) == 3


def test_nothing_measured_is_nothing_shown() -> None:
    console = Console(file=StringIO(), width=180)
    print_all(Results({}), console)
    assert isinstance(console.file, StringIO)
    assert not console.file.getvalue()
