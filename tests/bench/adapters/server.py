"""`topwork serve` as a child process: when its start-up steps began, what it counts, what it uses.

Owns the process and all that it starts.
"""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from deploy.bench.http_target import BenchError
from tests.bench.adapters.counts import Counts, count_tiers, read_counts
from tests.bench.process_tree import ProcessTree
from tests.ports import free_port

BASE = "smollm2"
REGISTERED, READY = "loading the model", "Ctrl-C takes it down"  # begins, then
START_TIMEOUT = 300.0  # seconds
STOP_TIMEOUT = 60.0  # seconds


class BenchServer:
    """A server on a port of its own; leave the `with` block to end it.

    Its output goes to a terminal of its own, because only to a terminal does it show each step as
    it begins.
    """

    def __init__(
        self,
        label: str,
        model_dir: Path,
        *flags: str,
        port: int | None = None,
        root: Path | None = None,
    ) -> None:
        """Start it: of this tree, or of the clone at `root`, which has a venv of its own."""
        self.label = label
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._output = bytearray()
        self._seen: dict[str, float] = {}  # seconds since the start, by text
        self._is_decided = threading.Event()  # ready or ended
        self._master, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (50, 200))
        python = str(root / ".venv/bin/python") if root else sys.executable
        command = [python, "-m", "deploy.cli", "serve", "--model", str(model_dir)]
        command += ["--served-model-name", BASE, "--port", str(self.port), *flags]
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            cwd=root,
            env={**environment, "TERM": "xterm"},
        )
        os.close(terminal)
        self._reader = threading.Thread(target=self._read, name=f"output of {label}", daemon=True)
        self._reader.start()

    def __enter__(self) -> "BenchServer":
        """Wait until requests are served.

        Raises:
            BenchError: if the server ends or takes too long, with the end of what it said.
        """
        try:
            self._is_decided.wait(START_TIMEOUT)
        finally:
            if READY not in self._seen:
                self._stop()
        if READY not in self._seen:
            told = plain_text(bytes(self._output))[-4000:]
            raise BenchError(f"the server {self.label} is not ready:\n{told}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the server and all that it started."""
        self._stop()

    @property
    def pid(self) -> int:
        """The process that all others of the server descend from."""
        return self._process.pid

    @property
    def registered_after(self) -> float:
        """Seconds from the start of the process until all adapters were registered."""
        return self._seen[REGISTERED]

    @property
    def ready_after(self) -> float:
        """Seconds from the start of the process until requests were served."""
        return self._seen[READY]

    def counts(self) -> Counts:
        """Return what /metrics says of adapters now."""
        return read_counts(httpx.get(f"{self.url}/metrics", timeout=60.0).raise_for_status().text)

    def tiers(self) -> dict[str, int]:
        """Return how many adapters are in each tier."""
        reply = httpx.get(f"{self.url}/v1/adapters", timeout=60.0).raise_for_status()
        return count_tiers(reply.json()["data"])

    def adapter(self, name: str) -> dict[str, Any]:
        """Return what GET /v1/adapters/{name} says."""
        reply = httpx.get(f"{self.url}/v1/adapters/{name}", timeout=60.0).raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def cpu_seconds(self) -> dict[int, float]:
        """Return the CPU time of the server's processes so far, by pid."""
        return ProcessTree(self.pid).cpu_seconds()

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._master, 65536)
            except OSError:  # what Linux says when the last writer has gone
                break
            self._output += read
            for text in (REGISTERED, READY):
                if text not in self._seen and text.encode() in self._output:
                    self._seen[text] = time.perf_counter() - self._started
            if READY in self._seen:
                self._is_decided.set()
                del self._output[:-4000]
        self._is_decided.set()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(STOP_TIMEOUT)
        self._reader.join(STOP_TIMEOUT)
        os.close(self._master)


def plain_text(output: bytes) -> str:
    """Return what stands on a terminal after its output: no colours, no line that was redrawn."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode(errors="replace"))
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def cpu_used(before: dict[int, float], after: dict[int, float]) -> float:
    """Return the CPU seconds between two looks, of the processes that the second one found."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
