"""A target in a process of its own: workloads go to it as lines of JSON, and times come back.

Owns both ends of the pipe. The child may run another Python than ours, with other packages.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from deploy.bench.workload import Run, Sample, Workload

ROOT = Path(__file__).parents[2]
_OURS = {"PYTHONPATH", "ONEDNN_MAX_CPU_ISA"}
# Our folders must not be found by what the child imports later: transformers takes our `kernels`
# for Hugging Face's package of that name.
_START = """
import sys
from importlib import import_module
sys.path.insert(0, sys.argv[1])
serve = import_module(sys.argv[2]).serve
if sys.argv[3] == "foreign":
    sys.path.remove(sys.argv[1])
serve()
"""


class ChildError(Exception):
    """The child process has ended; it has said why on its standard error."""


class Answerer(Protocol):
    """What answers workloads in the child."""

    def run(self, workload: Workload, round_number: int) -> Run:
        """Answer one round of a workload and return its times."""


def inherited_environment() -> dict[str, str]:
    """Return what a measured process inherits: all but what is ours alone.

    `kernels.linear` keeps oneDNN from AMX, in this process too, and a peer is to have all of it.
    """
    return {key: value for key, value in os.environ.items() if key not in _OURS}


class ChildTarget:
    """Runs `serve()` of a module in a child process, made with the keywords in `made_of`.

    What the child says goes to our standard error, or to `log`.
    """

    def __init__(
        self,
        label: str,
        module: str,
        made_of: dict[str, Any],
        *,
        python: str = sys.executable,
        environment: Mapping[str, str],
        log: Path | None = None,
    ) -> None:
        self.label = label
        kind = "ours" if python == sys.executable else "foreign"
        with nullcontext() if log is None else log.open("w") as errors:
            self._child = subprocess.Popen(
                [python, "-c", _START, str(ROOT), module, kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**inherited_environment(), **environment},
            )
        self._ask(made_of)

    @property
    def pid(self) -> int:
        """The child."""
        return self._child.pid

    def run(self, workload: Workload, round_number: int) -> Run:
        """Answer one round of a workload and return its times.

        Raises:
            ChildError: if the child has died.
        """
        reply = self._ask({"workload": asdict(workload), "round": round_number})
        return Run(tuple(Sample(s["sent"], tuple(s["token_times"])) for s in reply["samples"]))

    def close(self) -> None:
        """End the child process."""
        if self._child.returncode is None:
            self._child.communicate()  # closes its input, which ends it

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        with suppress(BrokenPipeError):  # the next line says so
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            self.close()
            raise ChildError(f"the process of {self.label} died; see its output")
        return json.loads(line)


def serve_target(make: Callable[..., Answerer]) -> None:
    """Make a target of the first line's keywords and answer the workloads of all others."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not mix with the answers
    target: Answerer | None = None
    for line in sys.stdin:
        message = json.loads(line)
        reply: dict[str, Any] = {}
        if target is None:
            target = make(**message)
        else:
            fields = message["workload"]
            fields["models"] = tuple(fields["models"])
            run = target.run(Workload(**fields), message["round"])
            reply = {"samples": [asdict(sample) for sample in run.samples]}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
