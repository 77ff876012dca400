"""Adapters come, change and go at a served model while it is asked: what each caller is told."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.demo.many_adapters import WEIGHTS, make_many
from tests.end_to_end.asking import cached, complete, tokens, wait_for
from tests.end_to_end.engines import random_prompt
from tests.end_to_end.server import Server

pytestmark = [pytest.mark.model, pytest.mark.ray]
PROMPT = random_prompt(140)  # two pages and a part
SHORT = PROMPT[:70]  # a page and a part
JSON = {"Accept": "application/json"}
ENDLESS = 6000  # tokens that no stream comes to the end of here
MAX_PINNED = 7  # of the shared server's 8 slots
DATA = "data: "


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Thirty adapters of different bytes."""
    return make_many(tmp_path_factory.mktemp("many"), 30)


@contextmanager
def clean(server: Server) -> Iterator[None]:
    """See that nothing is leased at the end, and unload what is new."""
    before = {entry["name"] for entry in adapters(server)}
    yield
    wait_for(lambda: all(entry["leases"] == 0 for entry in adapters(server)))
    for entry in adapters(server):
        if entry["name"] not in before:
            assert unload(server, entry["name"]).status_code == 200
    wait_for(lambda: server.metric("topwork_kv_blocks_held") == 0)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    name = "keyed" if "keyed" in request.fixturenames else "server"
    with clean(request.getfixturevalue(name)):
        yield


def adapters(server: Server) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = server.get("/v1/adapters").json()["data"]
    return entries


def load(server: Server, name: str, path: Path, **extra: bool) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **extra}
    return server.post("/v1/load_lora_adapter", body, JSON)


def unload(server: Server, name: str, **extra: bool) -> httpx.Response:
    body = {"lora_name": name, **extra}
    return server.post("/v1/unload_lora_adapter", body, JSON)


def ask(server: Server, name: str, **extra: Any) -> httpx.Response:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **extra}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return server.post("/v1/completions", body)


def message(reply: httpx.Response) -> str:
    text: str = reply.json()["error"]["message"]
    return text


@contextmanager
def running(server: Server, name: str, count: int) -> Iterator[Iterator[dict[str, Any]]]:
    """Stream a request that has begun to answer; yield what comes of it."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": count, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True, "cache_salt": "stream"}
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        assert reply.status_code == 200
        lines = (line for line in reply.iter_lines() if line.startswith(DATA + "{"))
        first = next(lines)
        yield (json.loads(line.removeprefix(DATA)) for line in chain((first,), lines))


def first_tokens(chunks: Iterator[dict[str, Any]], count: int) -> list[int]:
    """Read a stream until so many tokens are there."""
    ids: list[int] = []
    while len(ids) < count:
        ids += next(chunks)["choices"][0]["token_ids"]
    return ids[:count]


@pytest.mark.slow  # `make test-servers`
def test_thirty_adapters_loaded_at_once_are_thirty_and_answer_as_alone(
    server: Server, many: list[Path]
) -> None:
    names = [path.name for path in many]
    with ThreadPoolExecutor(30) as clients:
        replies = list(clients.map(lambda path: load(server, path.name, path), many))
        assert [reply.status_code for reply in replies] == [200] * 30
        assert len({reply.json()["digest"] for reply in replies}) == 30
        together = list(clients.map(lambda name: tokens(complete(server, name, SHORT, 8)), names))
        # Again, in another order and company, and from nothing that was computed before.
        again = list(
            clients.map(
                lambda name: tokens(complete(server, name, SHORT, 8, cache_salt="2")), names[::-1]
            )
        )
        assert together == again[::-1]
        assert len({tuple(answer) for answer in together}) > 10, "adapters must matter"
        gone = list(clients.map(lambda name: unload(server, name), names))
    assert [reply.status_code for reply in gone] == [200] * 30
    assert not {entry["name"] for entry in adapters(server)} & set(names)


def test_an_unload_lets_what_runs_finish_and_refuses_what_is_new(
    server: Server, many: list[Path]
) -> None:
    digest = load(server, "leaves", many[0]).json()["digest"]
    whole = tokens(complete(server, "leaves", PROMPT, 100))
    with ThreadPoolExecutor(1) as clients:
        # One ends by itself and one long after it, so that the unload has something to wait for.
        with (
            running(server, "leaves", ENDLESS) as endless,
            running(server, "leaves", 100) as short,
        ):
            unloading: Future[httpx.Response] = clients.submit(unload, server, "leaves")
            # Not by asking for it: who comes in just before may have to wait for what runs.
            wait_for(lambda: all(entry["name"] != "leaves" for entry in adapters(server)))
            refused = ask(server, "leaves")
            assert refused.json()["error"]["code"] == "model_not_found"
            assert "leaves" in message(refused)
            assert first_tokens(short, 100) == whole
            assert first_tokens(endless, 100) == whole
            assert not unloading.done(), "it waits for what runs"
        result = unloading.result()
    assert result.status_code == 200
    (freed,) = result.json()["freed"]
    assert (freed["digest"], freed["forgotten"]) == (digest, True)
    assert freed["pages"] > 0 and freed["host_bytes"] > 0 and len(freed["slots"]) == 1


def test_a_forced_unload_ends_what_runs_with_the_reason(server: Server, many: list[Path]) -> None:
    load(server, "forced", many[1])
    with running(server, "forced", ENDLESS) as chunks:
        next(chunks)
        assert unload(server, "forced", force=True).status_code == 200
        *_, last = chunks
    assert last["error"]["code"] == 404
    assert "unloaded" in last["error"]["message"]


def test_what_is_not_there_cannot_be_unloaded_nor_what_is_there_loaded_twice(
    server: Server, many: list[Path]
) -> None:
    missing = unload(server, "nobody")
    assert missing.status_code == 404 and "nobody" in message(missing)
    assert load(server, "once", many[2]).status_code == 200
    twice = load(server, "once", many[3])
    assert twice.status_code == 400 and "already been loaded" in message(twice)
    assert unload(server, "once").status_code == 200
    assert unload(server, "once").status_code == 404


def test_a_load_in_place_answers_as_the_new_bytes_and_the_same_bytes_stay_warm(
    server: Server, many: list[Path]
) -> None:
    for name, path in (("new", many[5]), ("changes", many[4])):
        assert load(server, name, path).status_code == 200
    new, old = tokens(ask(server, "new").json()), tokens(ask(server, "changes").json())
    assert new != old, "the test needs two adapters that answer differently"
    assert load(server, "changes", many[6], load_inplace=True).json()["version"] == 2
    first = ask(server, "changes").json()
    assert cached(first) == 0
    assert tokens(first) != old
    assert load(server, "changes", many[6], load_inplace=True).json()["version"] == 2
    assert cached(ask(server, "changes").json()) == 128
    # Bytes that another name has had all along are warm at once, and are its bytes.
    assert load(server, "changes", many[5], load_inplace=True).json()["version"] == 3
    warm = ask(server, "changes").json()
    assert (tokens(warm), cached(warm)) == (new, 128)


@pytest.mark.slow  # `make test-servers`
def test_all_slots_but_one_are_pinned_one_more_is_refused_and_all_others_are_served(
    server: Server, many: list[Path]
) -> None:
    pinned, others = many[:MAX_PINNED], many[MAX_PINNED : MAX_PINNED + 8]
    for path in pinned:
        assert load(server, path.name, path, pinned=True).status_code == 200
    refused = load(server, "more", others[0], pinned=True)
    assert refused.status_code == 400
    assert f"{MAX_PINNED} adapters are pinned already, and {MAX_PINNED} may be" in message(refused)
    assert refused.json()["error"]["param"] == "pinned"
    assert ask(server, "more").status_code == 404
    with ThreadPoolExecutor(16) as clients:
        loads = list(clients.map(lambda path: load(server, path.name, path), others))
        assert [reply.status_code for reply in loads] == [200] * 8
        names = [path.name for path in (*pinned, *others)]
        replies = list(clients.map(lambda name: ask(server, name), names))
    assert [reply.status_code for reply in replies] == [200] * 15
    entries = {entry["name"]: entry for entry in adapters(server)}
    assert all(entries[path.name]["pinned"] and entries[path.name]["slots"] for path in pinned)
    assert sum(len(entries[path.name]["slots"]) for path in others) == 1


SPOILERS = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
    "a link to nowhere": lambda file: (file.unlink(), file.symlink_to("/nowhere/at/all")),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}
REASONS = {
    "truncated": "adapter_model.safetensors",
    "a directory": "adapter_model.safetensors cannot be read: Is a directory",
    "a link to nowhere": "adapter_model.safetensors is missing",
    "a pipe": "adapter_model.safetensors is not a regular file",
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_weights_that_cannot_be_read_are_refused_and_the_version_before_goes_on(
    server: Server, many: list[Path], tmp_path: Path, spoiler: str
) -> None:
    loaded = load(server, "stays", many[8]).json()
    before = tokens(ask(server, "stays").json())
    shutil.copytree(many[9], tmp_path / "spoilt")
    SPOILERS[spoiler](tmp_path / "spoilt" / WEIGHTS)
    refused = load(server, "stays", tmp_path / "spoilt", load_inplace=True)
    assert refused.status_code == 400
    assert REASONS[spoiler] in message(refused) and str(tmp_path) in message(refused)
    assert tokens(ask(server, "stays").json()) == before
    (entry,) = (entry for entry in adapters(server) if entry["name"] == "stays")
    assert (entry["version"], len(entry["versions"])) == (loaded["version"], 1)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds half an adapter."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_an_adapter_that_a_full_disk_cut_short_is_refused(
    server: Server, many: list[Path], full_disk: Path
) -> None:
    source = max(many, key=lambda path: (path / WEIGHTS).stat().st_size)
    (full_disk / "cut").mkdir()
    shutil.copy(source / "adapter_config.json", full_disk / "cut")
    with pytest.raises(OSError, match="No space left on device"):
        shutil.copy(source / WEIGHTS, full_disk / "cut")
    refused = load(server, "cut", full_disk / "cut")
    assert refused.status_code == 400 and WEIGHTS in message(refused)
    assert ask(server, "cut").status_code == 404


@pytest.mark.slow  # `make test-servers`
def test_a_directory_that_goes_while_a_request_waits_for_its_slot_fails_that_request_alone(
    keyed: Server, many: list[Path], tmp_path: Path
) -> None:
    # With one slot, the sequence that runs is not preempted for those in line: they wait for it.
    shutil.copytree(many[3], tmp_path / "doomed")
    for name, path in (("one", many[1]), ("doomed", tmp_path / "doomed"), ("last", many[7])):
        assert load(keyed, name, path).status_code == 200  # the last one alone is in memory then
    with ThreadPoolExecutor(2) as clients:
        with running(keyed, "one", ENDLESS) as one:
            # The one in front is in memory already, so that the other is not read before its turn.
            last = clients.submit(ask, keyed, "last")
            wait_for(lambda: keyed.metric("topwork_requests_waiting") == 1)
            doomed = clients.submit(ask, keyed, "doomed")
            wait_for(lambda: keyed.metric("topwork_requests_waiting") == 2)
            shutil.rmtree(tmp_path / "doomed")
            assert len(first_tokens(one, 50)) == 50, "who runs is not disturbed"
        assert last.result().status_code == 200
        failed = doomed.result()
    assert failed.status_code == 404
    assert "there is no such directory" in message(failed) and str(tmp_path) in message(failed)
