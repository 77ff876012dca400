"""`topwork serve` as a child process, that serves the demo model and its adapters."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.end_to_end.asking import Endpoint, wait_for
from tests.end_to_end.processes import family, title
from tests.patience import PATIENCE
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
MODEL_DIR = Path.home() / ".cache" / "topwork" / "models" / "SmolLM2-135M-Instruct"
ADAPTERS_DIR = ROOT / "deploy" / "demo" / "adapters"


def adapter_dirs() -> dict[str, Path]:
    return {d.name: d for d in sorted(ADAPTERS_DIR.iterdir()) if d.is_dir()}


MODELS = ["smollm2", *adapter_dirs()]


def serve_command(port: int, *flags: str) -> list[str]:
    """Return the command that serves the demo model and its adapters."""
    command = [str(Path(sys.executable).parent / "topwork"), "serve"]
    command += ["--model", str(MODEL_DIR), "--served-model-name", "smollm2"]
    command += ["--port", str(port), *flags]
    for name, directory in adapter_dirs().items():
        command += ["--adapter", f"{name}={directory}"]
    return command


class Server(Endpoint):
    """`topwork serve` as a child process."""

    def __init__(
        self,
        log: Path,
        *flags: str,
        port: int | None = None,
        headers: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            log: where it writes.
            flags: of `topwork serve`, beside the model and its adapters.
            port: a free one if not given.
            headers: of each call that is made by this object.
            environment: what is there beside what is in this process's.
        """
        self.port = port or free_port()
        self.headers = headers or {}
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                serve_command(self.port, *flags),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "", **(environment or {})},
            )

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            return "Ctrl-C takes it down" in self.log.read_text()

        wait_for(is_ready, self.log.read_text)

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by name and labels as written."""
        text = self.get("/metrics").text
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def metric(self, name: str) -> float:
        """Return the sum over all labels of one metric."""
        found = [v for k, v in self.metrics().items() if re.match(rf"{name}(\{{|$)", k)]
        assert found, f"no metric {name}"
        return sum(found)

    def processes(self) -> set[int]:
        """Return the pids of this server and of everything that it started."""
        return family(self.process.pid)

    def rank_pids(self) -> list[int]:
        """Return the pids of the ranks, in no order."""
        return [pid for pid in self.processes() if title(pid).startswith("ray::WorkerActor")]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE)

    def chat(self, model: str, text: str, **extra: Any) -> dict[str, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": text}], **extra}
        reply = self.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        result: dict[str, Any] = reply.json()
        return result
