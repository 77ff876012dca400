"""Whatever is measured: processes that answer workloads, and sleep while others do."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Event, Thread

import httpx

from deploy.bench.child import ChildTarget
from deploy.bench.http_target import BenchError, HttpTarget
from deploy.bench.workload import Run, Workload
from tests.bench.process_tree import ProcessTree

WAKE_TIMEOUT = 60.0  # seconds
LOOK_EVERY = 1.0  # seconds, at memory: a look delays whoever allocates


@dataclass(frozen=True, slots=True)
class Target:
    """A running one, asleep but for its turns."""

    name: str
    tree: ProcessTree
    answer: Callable[[Workload, int], Run]
    health_url: str | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wake it, and let it sleep again after the block.

        Raises:
            BenchError: if it does not say that it is healthy.
        """
        with self.tree.awake():
            if self.health_url is not None:
                wait_until_healthy(self.name, self.health_url, WAKE_TIMEOUT, self.tree.pids)
            yield

    @contextmanager
    def watched(self) -> Iterator[list[int]]:
        """Fill a list with its bytes of memory, look by look, until the block ends."""
        looks: list[int] = []
        is_over = Event()

        def look() -> None:
            while not is_over.wait(LOOK_EVERY):
                looks.append(self.tree.memory_bytes())

        looker = Thread(target=look, name=f"memory of {self.name}")
        looker.start()
        try:
            yield looks
        finally:
            is_over.set()
            looker.join()
            looks.append(self.tree.memory_bytes())


@dataclass(frozen=True, slots=True)
class Opener:
    """How to start a target; its name is known before."""

    name: str
    open: Callable[[], AbstractContextManager[Target]]


def http(name: str, server: HttpTarget, pid: int, url: str) -> Target:
    """Return a server as a target."""
    return Target(name, ProcessTree(pid), server.run, f"{url}/health")


@contextmanager
def child(name: str, started: ChildTarget) -> Iterator[Target]:
    """Give a child process as a target, and end it."""
    try:
        yield Target(name, ProcessTree(started.pid), started.run)
    finally:
        started.close()


def wait_until_healthy(name: str, url: str, timeout: float, alive: Callable[[], object]) -> None:
    """Ask until the answer is 200.

    Raises:
        BenchError: if it takes too long, or nothing of the server is `alive` any more.
    """
    deadline, answer = time.monotonic() + timeout, "nothing"
    with httpx.Client(timeout=5.0) as client:
        while alive():
            try:
                reply = client.get(url)
                if reply.status_code == 200:
                    return
                answer = f"{reply.status_code} {reply.text[:200]}"
            except httpx.HTTPError as error:
                answer = str(error)
            if time.monotonic() > deadline:
                raise BenchError(f"{name} is not healthy after {timeout:g} s: {answer}")
            time.sleep(0.1)
    raise BenchError(f"{name} has ended")
