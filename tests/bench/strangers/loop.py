"""`python -m tests.bench.strangers.loop`: how long the loop of one router stands still.

A router without a model or Ray, in this process; a task on its loop wakes every five milliseconds
and notes how late it is, and how much of that its thread waited for a core: what is left is what
calls have taken of the loop, by work on it or by holding the interpreter elsewhere.
"""

import asyncio
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
import uvloop

from cluster.api.app import create_app
from cluster.router.config import RouterConfig
from cluster.router.router import Router
from cluster.router.testing.fake_backend import FakeBackend
from cluster.router.testing.fake_scheduler import FakeScheduler
from deploy.demo.model import demo_model
from deploy.serving.process_setup import give_way_soon
from tests.bench.strangers.bodies import bodies
from tests.bench.strangers.watching import resident_bytes
from tests.ports import free_port

WAKE_SECONDS = 0.005
MODEL = "model"
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Pause:
    """One wake that came late."""

    seconds: float  # late
    waiting: float  # seconds for a core
    computing: float  # seconds of this thread

    @property
    def stalled(self) -> float:
        """Seconds that the loop could have run on a core and did not look at this task."""
        return self.seconds - self.waiting


class Probe:
    """A task that wakes and notes how late."""

    def __init__(self) -> None:
        self.pauses: list[Pause] = []
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def _times(self) -> tuple[float, float]:
        computing, waiting, _ = self._file.read_text().split()
        return int(computing) / 1e9, int(waiting) / 1e9

    async def run(self) -> None:
        """Wake again and again, until cancelled."""
        computed, waited = self._times()
        while True:
            began = time.perf_counter()
            await asyncio.sleep(WAKE_SECONDS)
            late = time.perf_counter() - began - WAKE_SECONDS
            computing, waiting = self._times()
            self.pauses.append(Pause(late, waiting - waited, computing - computed))
            computed, waited = computing, waiting

    def longest(self) -> Pause:
        """Return the longest stall since the last time, which is forgotten."""
        pauses, self.pauses = self.pauses, []
        return max(pauses, key=lambda pause: pause.stalled)


async def _send(url: str, listed: Path, probe: Probe) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.strangers.sender", url, str(listed)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readline()  # it is ready
    await asyncio.sleep(2 * WAKE_SECONDS)
    probe.longest()  # to start a process takes a while itself
    output, _ = await process.communicate(b"now\n")
    said: dict[str, Any] = json.loads(output)
    return said


async def _measure(directory: Path, folder: Path, only: str, at_once: int, rounds: int) -> None:
    config = RouterConfig(
        model_name=MODEL,
        model_dir=str(directory),
        context_length=8192,
        vocab_size=49152,
        eos_token_ids=(2,),
    )
    scheduler = FakeScheduler()
    router = Router(config, FakeBackend(await scheduler.start()))
    await router.start()
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(create_app(router), port=port, log_level="critical", lifespan="off")
    )
    serving = asyncio.create_task(server.serve())
    probe = Probe()
    probing = asyncio.create_task(probe.run())
    made = {kind: one for kind, one in bodies(MODEL).items() if only in kind}
    listed = folder / "calls"
    await asyncio.sleep(2)
    give_way_soon()
    for round_number in range(rounds):
        for number, (kind, (path, body)) in enumerate(made.items()):
            file = folder / str(number)
            file.write_bytes(body)
            listed.write_text((json.dumps([path, str(file)]) + "\n") * at_once)
            said = await _send(f"http://127.0.0.1:{port}", listed, probe)
            await asyncio.sleep(0.2)
            worst = probe.longest()
            held = resident_bytes(threading.get_native_id()) / MEBIBYTE
            answer = max(said["answers"], key=lambda answer: said["answers"][answer])
            print(
                f"{round_number} {kind:34} stalled {1e3 * worst.stalled:6.1f} ms (computing "
                f"{1e3 * worst.computing:5.1f}, waiting {1e3 * worst.waiting:5.1f})  {held:5.0f} MB"
                f"  {said['seconds']:5.1f} s  {answer[:60]}",
                flush=True,
            )
    probing.cancel()
    server.should_exit = True
    await serving
    await router.close()
    await scheduler.close()


def main(
    only: Annotated[str, typer.Option(help="Bodies with this in the name of their kind.")] = "",
    at_once: Annotated[int, typer.Option(help="Bodies of a kind at the same time.")] = 4,
    rounds: Annotated[int, typer.Option(help="Of all kinds; memory settles in the first.")] = 2,
) -> None:
    """Measure one router."""
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(_measure(demo_model(), Path(folder), only, at_once, rounds))


if __name__ == "__main__":
    typer.run(main)
