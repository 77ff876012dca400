"""Two thousand adapters, sixteen slots: every answer is what its adapter gives alone.

Slots, host memory and disk are all in play, and nothing is held when the traffic is over.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from cluster.request import Request
from tests.bench.adapters.counts import count_tiers, read_counts
from tests.bench.adapters.directories import adapter_directory, adapter_names, mean_shard_bytes
from tests.bench.adapters.popularity import by_zipf, in_turn
from tests.end_to_end.asking import wait_for
from tests.end_to_end.engines import GREEDY, make_engine
from tests.end_to_end.server import MODEL_DIR, Server, adapter_dirs
from worker.model_config_reader import read_model_config

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]

NUM_ADAPTERS, NUM_SLOTS, NUM_IN_HOST = 2000, 16, 200
NUM_REQUESTS = 300  # of each kind of traffic
CLIENTS = 16
TP = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the traffic; equal ones must get equal answers."""

    adapter: str
    prompt: tuple[int, ...]
    max_tokens: int


def traffic(kind: str, picks: tuple[int, ...]) -> list[Asked]:
    """Return requests with prompts of different lengths; some share their beginning."""
    source = Random(kind)
    shared = tuple(source.randrange(100, 49000) for _ in range(96))
    names = adapter_names(NUM_ADAPTERS)
    return [
        Asked(
            names[pick],
            shared[: source.choice((0, 0, 70, 96))]
            + tuple(source.randrange(100, 49000) for _ in range(source.randrange(1, 48))),
            source.randrange(8, 13),
        )
        for pick in picks
    ]


ZIPF = traffic("zipf", by_zipf(NUM_ADAPTERS, NUM_REQUESTS, exponent=1.1, seed="tokens"))
IN_TURN = traffic("in turn", in_turn(NUM_ADAPTERS, NUM_REQUESTS, start=0))


@pytest.fixture(scope="module")
def directory() -> Path:
    return adapter_directory(NUM_ADAPTERS)


@pytest.fixture(scope="module")
def full_server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = mean_shard_bytes(directory, read_model_config(MODEL_DIR), TP)
    server = Server(
        *(tmp_path_factory.mktemp("many") / "log.txt", "--tp", str(TP)),
        *("--adapter-dir", str(directory), "--max-loras", str(NUM_SLOTS)),
        *("--host-adapter-memory", str(NUM_IN_HOST * one)),
    )
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def ask(client: httpx.Client, asked: Asked) -> list[int]:
    body = {
        "model": asked.adapter,
        "prompt": asked.prompt,
        "max_tokens": asked.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, f"{asked.adapter}: {reply.text}"
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def listing(server: Server) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = server.get("/v1/adapters").json()["data"]
    return entries


def test_every_answer_is_what_its_adapter_gives_alone(full_server: Server, directory: Path) -> None:
    asked = [*ZIPF, *IN_TURN, *ZIPF[:100]]  # at last some that went to disk meanwhile
    assert count_tiers(listing(full_server)) == {"disk": NUM_ADAPTERS + len(adapter_dirs())}
    with full_server.client() as client, ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(partial(ask, client), asked))
    check_tiers(full_server, asked)
    wrong = [
        (one.adapter, len(one.prompt), got, alone)
        for one, got, alone in zip(asked, answers, answers_alone(asked, directory), strict=True)
        if got != alone
    ]
    assert not wrong, f"{len(wrong)} of {len(asked)} answers differ, such as {wrong[:3]}"


def check_tiers(server: Server, asked: list[Asked]) -> None:
    """See that adapters came from everywhere and went everywhere, and that nobody holds one."""
    wait_for(lambda: server.metric("topwork_requests_running") == 0)
    entries, used = listing(server), {one.adapter for one in asked}
    assert [entry["name"] for entry in entries if entry["leases"]] == []
    tiers = count_tiers(entries)
    assert tiers["device"] == NUM_SLOTS
    read = {entry["name"] for entry in entries if entry["digest"] is not None}
    assert read == used
    in_memory = tiers["device"] + tiers["host"]
    assert NUM_IN_HOST / 2 < in_memory < len(read), "some went back to disk, and no more than must"
    loads = read_counts(server.get("/metrics").text).loads
    assert loads > len(used), "some came into a slot twice, so slots were evicted"
    assert loads < len(asked), "some were found in their slot"


def answers_alone(asked: list[Asked], directory: Path) -> list[list[int]]:
    """Return what one engine answers that has one adapter and one request at a time."""
    engine = make_engine(TP, "bfloat16", num_slots=1, prefix_cache=False, token_budget=512)
    answers: dict[Asked, list[int]] = {}
    try:
        for number, one in enumerate(sorted(set(asked), key=lambda one: one.adapter)):
            digest = engine.add_adapter(directory / one.adapter)
            request = Request(str(number), digest, one.prompt, GREEDY, max_tokens=one.max_tokens)
            (answer,) = engine.generate([request])
            answers[one] = answer.token_ids
    finally:
        engine.close()
    return [answers[one] for one in asked]
