"""Keys come and go under load on several routers, and a file that is torn harms nobody."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.server import Server
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

NUM_ROUTERS = 3
NUM_ROUNDS = 3
SECONDS = 5.0  # after which a key that was taken away opens nothing
REPORTS = 3.0  # seconds in which what routers count reaches their metrics
LOOKS = 3.5  # seconds that a broken file lies there: more looks than it takes to see it
STAYS = "{key: stays-secret, tenant: acme, scopes: [metrics]}"
KEEPS = {"Authorization": "Bearer stays-secret"}


def numbered(number: int) -> str:
    return f"{{key: secret-number-{number}, tenant: bolt}}"


def written(*entries: str) -> str:
    return "".join(f"- {entry}\n" for entry in entries)


def replace(path: Path, text: str) -> None:
    """Replace a file as a whole."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


class Load:
    """Streams and short calls of a key that stays, without a pause; each must be answered."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_over = threading.Event()
        self.num_answered = 0
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(3)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        body = {
            "model": "smollm2",
            "prompt": "Once",
            "max_tokens": 24,
            "temperature": 0,
            "stream": True,
        }
        while not self._is_over.is_set():
            try:
                with httpx.stream(
                    "POST",
                    f"{self._server.url}/v1/completions",
                    json=body,
                    headers=KEEPS,
                    timeout=PATIENCE,
                ) as reply:
                    text = "".join(reply.iter_text())
                if reply.status_code != 200 or "[DONE]" not in text or '{"error"' in text:
                    self.faults.append(f"{reply.status_code}: {text}")
                self.num_answered += 1
            except httpx.HTTPError as error:
                self.faults.append(repr(error))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(written(STAYS, numbered(0)))
    return path


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Server]:
    flags = ("--tp", "1", "--routers", str(NUM_ROUTERS), "--api-key-file", str(path))
    running = Server(path.with_name("log.txt"), *flags)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


def status(server: Server, key: str) -> int:
    """Return what a call by a connection of its own is answered."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE).status_code


def refusals(server: Server) -> dict[str, float]:
    """Return how many calls each router has refused for want of a key."""
    text = httpx.get(f"{server.url}/metrics", headers=KEEPS, timeout=PATIENCE).text
    by_router: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("topwork_http_requests_total{"):
            labels, value = line.rsplit(" ", 1)
            router = labels.partition('router="')[2].partition('"')[0]
            if router:
                refused = float(value) if 'code="401"' in labels else 0.0
                by_router[router] = by_router.get(router, 0.0) + refused
    return by_router


class Until:
    """Asks with a key, twice at a time, until `last` seconds are over."""

    def __init__(self, server: Server, key: str, wanted: int, begun: float, last: float) -> None:
        self.seconds = 0.0  # to the last call that was answered otherwise than wanted
        self.num_calls = 0
        self._asking = (server, key, wanted, begun, last)
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> "Until":
        for thread in self._threads:
            thread.join()
        return self

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s ({self.num_calls} calls)"

    def _ask(self) -> None:
        server, key, wanted, begun, last = self._asking
        while (now := time.monotonic()) < begun + last:
            if status(server, key) != wanted:
                self.seconds = max(self.seconds, now - begun)
            self.num_calls += 1


def test_a_key_that_is_removed_is_refused_by_every_router_while_load_goes_on(
    server: Server, path: Path
) -> None:
    def have_all_counted() -> bool:
        assert status(server, "nobodys-secret") == 401
        return len(refusals(server)) == NUM_ROUTERS

    figures = []
    wait_for(have_all_counted)
    with Load(server) as load:
        for number in range(NUM_ROUNDS):
            old, new = f"secret-number-{number}", f"secret-number-{number + 1}"
            assert status(server, old) == 200
            time.sleep(REPORTS)
            before = refusals(server)
            begun = time.monotonic()
            replace(path, written(STAYS, numbered(number + 1)))
            gone = Until(server, old, 401, begun, 2 * SECONDS)
            there = Until(server, new, 200, begun, 2 * SECONDS)
            figures.append((gone.wait(), there.wait()))

            def have_all_refused(old: str = old, before: dict[str, float] = before) -> bool:
                assert status(server, old) == 401
                after = refusals(server)
                return all(after[router] > before[router] for router in before)

            wait_for(have_all_refused)
    told = [f"refused after {gone}, taken after {there}" for gone, there in figures]
    print(json.dumps({"rounds": told, "answered": load.num_answered}))
    assert not load.faults, load.faults
    assert load.num_answered > 0
    assert all(one.seconds < SECONDS for pair in figures for one in pair), told


def truncated(path: Path, text: str) -> None:
    path.write_text(text[: len(text) - 20])


def half(path: Path, text: str) -> None:
    path.write_text(text[: text.index("tenant")])


def in_pieces(path: Path, text: str) -> None:
    with path.open("w") as file:
        for begin in range(0, len(text), 16):
            file.write(text[begin : begin + 16])
            file.flush()
            time.sleep(0.4)  # the writer is slow; nothing waits for it


def empty(path: Path, text: str) -> None:
    path.write_text("")


def directory(path: Path, text: str) -> None:
    path.unlink()
    path.mkdir()


def away(path: Path, text: str) -> None:
    path.unlink()


def dangling(path: Path, text: str) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def unreadable(path: Path, text: str) -> None:
    if os.getuid():
        path.chmod(0)
    else:  # whom the mode of a file does not keep out
        path.unlink()
        path.symlink_to("/proc/self/mem")


def pipe(path: Path, text: str) -> None:
    path.unlink()
    os.mkfifo(path)


def binary(path: Path, text: str) -> None:
    path.write_bytes(b"\x00\xff" * 4096)


@pytest.mark.parametrize(
    "tear",
    [truncated, half, in_pieces, empty, directory, away, dangling, unreadable, pipe, binary],
    ids=lambda tear: tear.__name__,
)
def test_a_torn_file_harms_nobody(
    server: Server, path: Path, tear: Callable[[Path, str], None]
) -> None:
    text = written(STAYS, numbered(77))
    replace(path, text)
    deadline = time.monotonic() + PATIENCE
    while status(server, "secret-number-77") != 200 and time.monotonic() < deadline:
        pass
    time.sleep(SECONDS)  # all routers know it, not only the one that was asked
    with Load(server) as load:
        begun = time.monotonic()
        tear(path, text)
        while time.monotonic() < begun + LOOKS:
            assert status(server, "secret-number-77") == 200
            assert status(server, "nobodys-secret") == 401
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        replace(path, written(STAYS, numbered(78)))
        mended = time.monotonic()
        gone = Until(server, "secret-number-77", 401, mended, 2 * SECONDS).wait()
    print(json.dumps({tear.__name__: f"mended, refused after {gone}", "n": load.num_answered}))
    assert not load.faults, load.faults
    assert load.num_answered > 0
    assert gone.seconds < SECONDS
    assert status(server, "secret-number-78") == 200
