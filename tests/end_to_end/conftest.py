"""The servers that tests share, each with its own flags, and the order in which they live.

An idle server takes a tenth of a core, so that each lives while tests ask for it, and none beside
tests that need no server.
"""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.lent_servers import FAILED, LentServer
from tests.end_to_end.server import Server
from tests.end_to_end.terminal import ServerInTerminal
from tests.otlp_receiver import ENVIRONMENT, Receiver, receiving
from tests.patience import PATIENCE

# The fixtures below: who asks for one further behind comes later.
TURNS = ("victim", "last_victim", "keyed", "last_keyed", "server", "shown", "last_shown")
KEY, ADMIN_KEY = "sk-KEYMARK-0123456789", "sk-ADMINMARK-0123456789"
NUM_PAGES, PAGE_SIZE = 24, 16  # of the server in a terminal
PAGE_BYTES = 30 * 2 * 2 * PAGE_SIZE * 64 * 2  # of rank 0, which has two of the three KV heads


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)


def _turn(test: pytest.Item) -> int:
    asked: Any = getattr(test, "fixturenames", ())
    is_here = test.path.parent == Path(__file__).parent
    return max((TURNS.index(name) + 1 for name in asked if name in TURNS), default=0) * is_here


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on two ranks that all tests share; tests that break things take a victim."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    lent = LentServer(lambda: Server(log, "--tp", "2", "--max-num-batched-tokens", "256"))
    try:
        yield lent.start()
    finally:
        lent.end()


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """What gets the spans of the victims."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def victims(
    tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> Iterator[LentServer[Server]]:
    def make() -> Server:
        return Server(
            tmp_path_factory.mktemp("victim") / "log.txt",
            *("--tp", "2", "--max-loras", "4", "--max-num-seqs", "16", "--vllm-metrics"),
            *("--otlp-traces-endpoint", receiver.url),
            # What runs at SIGTERM ends before the limit, however slow the machine is.
            *("--drain-timeout", str(int(PATIENCE))),
            environment=ENVIRONMENT | {"OTEL_BSP_SCHEDULE_DELAY": "50"},
        )

    lent = LentServer(make)
    yield lent
    lent.end()


@pytest.fixture
def victim(victims: LentServer[Server], request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server on two ranks whose processes a test may kill, if it is whole again at the end."""
    yield from victims.lend(request.node)


@pytest.fixture
def last_victim(victims: LentServer[Server], request: pytest.FixtureRequest) -> Iterator[Server]:
    """The same for a test that ends it."""
    yield from victims.lend(request.node, is_last=True)


@pytest.fixture(scope="session")
def keyed_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentServer[Server]]:
    def make() -> Server:
        folder = tmp_path_factory.mktemp("keyed")
        keys = [
            {"key": KEY, "tenant": "acme", "name": "app", "adapters": "*"},
            {"key": ADMIN_KEY, "tenant": "ops", "name": "admin", "adapters": "*", "admin": True},
        ]
        (folder / "keys.yaml").write_text(yaml.safe_dump(keys))
        return Server(
            folder / "log.txt",
            *("--api-key-file", str(folder / "keys.yaml"), "--usage-file", str(folder / "usage")),
            *("--request-log", "-", "--log-level", "DEBUG"),
            *("--max-loras", "1", "--host-adapter-memory", "1MiB"),
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
        )

    lent = LentServer(make)
    yield lent
    lent.end()


@pytest.fixture
def keyed(keyed_servers: LentServer[Server], request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with keys and all logs, of one slot, whose host memory holds one adapter."""
    yield from keyed_servers.lend(request.node)


@pytest.fixture
def last_keyed(
    keyed_servers: LentServer[Server], request: pytest.FixtureRequest
) -> Iterator[Server]:
    """The same for a test that ends it."""
    yield from keyed_servers.lend(request.node, is_last=True)


@pytest.fixture(scope="session")
def shown_servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LentServer[ServerInTerminal]]:
    def make() -> ServerInTerminal:
        folder = tmp_path_factory.mktemp("shown")
        return ServerInTerminal(
            *(folder, "--record", str(folder / "events")),
            *("--tp", "2", "--max-num-batched-tokens", "128", "--page-size", str(PAGE_SIZE)),
            *("--kv-cache-memory", str(NUM_PAGES * PAGE_BYTES), "--kv-host-memory", "16MiB"),
            *("--max-model-len", str(NUM_PAGES * PAGE_SIZE)),  # or there is a warning to be seen
        )

    lent = LentServer(make)
    yield lent
    lent.end()


@pytest.fixture
def shown(
    shown_servers: LentServer[ServerInTerminal], request: pytest.FixtureRequest
) -> Iterator[ServerInTerminal]:
    """A server in a terminal that has hardly any memory for KV, and that records."""
    yield from shown_servers.lend(request.node)


@pytest.fixture
def last_shown(
    shown_servers: LentServer[ServerInTerminal], request: pytest.FixtureRequest
) -> Iterator[ServerInTerminal]:
    """The same for a test that ends it."""
    yield from shown_servers.lend(request.node, is_last=True)
