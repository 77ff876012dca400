"""Servers that tests of several modules strike or load, and what takes one from those behind.

To start a server takes a minute of a core. A test that leaves one whole leaves it to the next; one
that fails takes it along, so that the next test gets a new one.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.server import Server

FAILED = pytest.StashKey[bool]()  # of a test that has failed up to now
One = TypeVar("One", bound=Server)


class LentServer(Generic[One]):
    """One server at a time, started when it is asked for."""

    def __init__(self, make: Callable[[], One]) -> None:
        self._make = make
        self._server: One | None = None

    def lend(self, test: pytest.Item, *, is_last: bool = False) -> Iterator[One]:
        """Give a server to a test that is healthy; `is_last`: nobody gets it after this one."""
        server = self._server or self.start()
        wait_for(server.is_healthy)
        yield server
        if is_last or test.stash.get(FAILED, False) or server.process.poll() is not None:
            self.end()

    def end(self) -> None:
        """End the server if there is one, with all that it has started."""
        server, self._server = self._server, None
        if server is None:
            return
        family = server.processes()
        if server.process.poll() is None:
            server.stop()
        left = {pid for pid in family if Path(f"/proc/{pid}").exists()}
        assert not left, f"processes left over: {left}"

    def start(self) -> One:
        """Return a new server that is ready."""
        self._server = server = self._make()
        try:
            server.wait_until_ready()
        except BaseException:
            self.end()
            raise
        return server
