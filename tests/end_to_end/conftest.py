"""The server that tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on two ranks that all tests share; tests that break things start their own."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    running = Server(log, "--tp", "2", "--max-num-batched-tokens", "256")
    try:
        running.wait_until_ready()
        yield running
    finally:
        before = running.processes()
        running.stop()
    left = {pid for pid in before if Path(f"/proc/{pid}").exists()}
    assert not left, f"processes left over: {left}"
