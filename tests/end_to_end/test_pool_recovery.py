"""An adapter pool that dies or hangs: what calls have made is there again, and nothing is 404."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.demo.many_adapters import make_many
from tests.end_to_end.asking import complete, tokens, wait_for
from tests.end_to_end.processes import title
from tests.end_to_end.server import Server
from tests.end_to_end.test_server_adapter_life import adapters, clean, load, unload

pytestmark = [pytest.mark.model, pytest.mark.ray]
PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Twenty adapters of different bytes."""
    return make_many(tmp_path_factory.mktemp("many"), 20)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Unload what a test has loaded into the server that others use after it."""
    if "victim" not in request.fixturenames:
        yield
        return
    with clean(request.getfixturevalue("victim")):
        yield


def pool_pids(server: Server) -> set[int]:
    return {pid for pid in server.processes() if title(pid).startswith("ray::PoolActor")}


def strike_pool(server: Server, blow: signal.Signals) -> None:
    """Kill or stop the pool's process, and wait for another one."""
    (pool,) = pool_pids(server)
    os.kill(pool, blow)
    wait_for(lambda: pool_pids(server) not in ({pool}, set()))


def catalogue(server: Server) -> dict[str, Any]:
    """Return what was made by calls, by name: not what was read since, nor where it is."""
    made: dict[str, Any] = {}
    for entry in adapters(server):
        versions = [
            {key: one[key] for key in ("version", "digest", "path", "share")}
            for one in entry["versions"]
        ]
        made[entry["name"]] = (entry["version"], entry["digest"], entry["pinned"], versions)
    return made


class Askers:
    """Clients that ask one adapter after the other until told to stop; statuses are counted."""

    def __init__(self, url: str, names: list[str]) -> None:
        self.statuses: Counter[int] = Counter()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(url, names[number::2])) for number in range(2)
        ]

    def __enter__(self) -> "Askers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, url: str, names: list[str]) -> None:
        turn = 0
        with httpx.Client(base_url=url, timeout=60) as client:
            while not self._stopping.is_set():
                turn += 1
                body = {"model": names[turn % len(names)], "prompt": PROMPT, "max_tokens": 2}
                reply = client.post("/v1/completions", json=body)
                self.statuses[reply.status_code] += 1
                if reply.status_code == 503:
                    assert "retry-after" in reply.headers
                    self._stopping.wait(0.2)


def test_a_pool_that_is_killed_or_hangs_is_there_again_with_all_that_calls_have_made(
    victim: Server, many: list[Path]
) -> None:
    for number, path in enumerate(many):
        assert load(victim, path.name, path, pinned=number < 2).status_code == 200
    changing, gone, *names = [path.name for path in many[2:]]
    assert load(victim, changing, many[0], load_inplace=True).json()["version"] == 2
    split = {"1": 40, "2": 60}
    assert victim.post(f"/v1/adapters/{changing}/split", split).status_code == 200
    assert unload(victim, gone).status_code == 200
    before = catalogue(victim)
    answers = {name: tokens(complete(victim, name, PROMPT, 8)) for name in names[:6]}
    for blow in (signal.SIGKILL, signal.SIGSTOP):
        with Askers(victim.url, names) as askers:
            wait_for(lambda: askers.statuses[200] > 4)
            strike_pool(victim, blow)
            askers.statuses[200] = 0
            wait_for(lambda: askers.statuses[200] > 10)
        assert set(askers.statuses) <= {200, 503}
        assert catalogue(victim) == before
        assert victim.post("/v1/completions", {"model": gone, "prompt": PROMPT}).status_code == 404
        for name, answer in answers.items():
            salted = complete(victim, name, PROMPT, 8, cache_salt=str(blow))
            assert tokens(salted) == answer
        entries = {entry["name"]: entry for entry in adapters(victim)}
        pinned = [path.name for path in many[:2]]
        assert [entries[name]["pinned"] for name in pinned] == [True, True]
    assert load(victim, gone, many[3]).json()["version"] == 2


def test_a_drain_outlives_the_pool_and_its_end_too(victim: Server) -> None:
    assert victim.post("/v1/drain").status_code == 200
    strike_pool(victim, signal.SIGKILL)
    assert victim.get("/v1/adapters").status_code == 200
    assert victim.get("/ready").json() == {"status": "draining"}
    assert httpx.delete(f"{victim.url}/v1/drain").status_code == 200
    wait_for(lambda: victim.get("/ready").status_code == 200)
    strike_pool(victim, signal.SIGKILL)
    assert victim.get("/v1/adapters").status_code == 200
    assert victim.get("/ready").status_code == 200


def test_a_pool_whose_replica_dies_with_it_is_there_again(victim: Server, many: list[Path]) -> None:
    load(victim, "called", many[0])
    before = catalogue(victim)
    (pool,) = pool_pids(victim)
    replica = "ray::ServeReplica:topwork:AdapterPool"
    for pid in {pid for pid in victim.processes() if title(pid).startswith(replica)}:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pool_pids(victim) not in ({pool}, set()))
    wait_for(lambda: victim.get("/v1/adapters").status_code == 200)
    assert catalogue(victim) == before


@pytest.mark.slow
def test_with_a_file_of_its_own_a_server_that_starts_again_has_what_calls_have_made(
    many: list[Path], tmp_path: Path
) -> None:
    flags = ("--adapter-state", str(tmp_path / "state"))
    first = Server(tmp_path / "first.txt", *flags)
    try:
        first.wait_until_ready()
        assert load(first, "called", many[0], pinned=True).status_code == 200
        assert unload(first, "pirate").status_code == 200
        before = catalogue(first)
        answer = tokens(complete(first, "called", PROMPT, 8))
    finally:
        first.stop()
    second = Server(tmp_path / "second.txt", *flags)
    try:
        second.wait_until_ready()
        assert catalogue(second) == before
        assert tokens(complete(second, "called", PROMPT, 8)) == answer
    finally:
        second.stop()
