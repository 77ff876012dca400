"""Where a scheduler is measured: a process of its own, on one core, that answers case by case.

A process of its own, so that neither side's garbage collector walks the other's objects. While one
side works the others wait for their next line. Standard library only, as `core`.
"""

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from tests.bench.scheduler.cases import Case, Measure, prepare
from tests.bench.scheduler.core import Core, CoreSizes, Sample

OURS, PEER = "ours", "tokenspeed-scheduler"
ROOT = Path(__file__).resolve().parents[3]


def open_core(side: str, sizes: CoreSizes) -> Core:
    """Make a fresh scheduler of one side; imports nothing of the other."""
    if side == OURS:
        from tests.bench.scheduler.our_core import OurCore

        return OurCore(sizes)
    from tests.bench.scheduler.peer_core import PeerCore

    return PeerCore(sizes)


class Side(Protocol):
    """A scheduler that can be measured."""

    @property
    def label(self) -> str:
        """OURS or PEER."""

    def measure(self, case: Case) -> Sample:
        """Measure one round of a case."""

    def close(self) -> None:
        """Let go of what the side holds."""


class LocalSide:
    """A side in this process."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._kept: dict[str, Measure] = {}

    def measure(self, case: Case) -> Sample:
        """Measure one round of a case."""
        if case.name in self._kept:
            return self._kept[case.name]()
        gc.collect()  # the case before this one; from here on it runs by itself, as in production
        measure = prepare(case, lambda sizes: open_core(self.label, sizes))
        if case.is_kept:
            self._kept[case.name] = measure
        return measure()

    def close(self) -> None:
        """Forget what was prepared."""
        self._kept.clear()


class ChildSide:
    """A side in a process of its own, pinned to one core."""

    def __init__(self, label: str, python: str, cpu: int) -> None:
        self.label = label
        self._child = subprocess.Popen(
            [python, "-m", "tests.bench.scheduler.side", label, str(cpu)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, case: Case) -> Sample:
        """Measure one round of a case, waiting until it is done.

        Raises:
            RuntimeError: if the process has ended; it has said why on its standard error.
        """
        assert self._child.stdin is not None and self._child.stdout is not None, "no pipes"
        print(json.dumps(asdict(case)), file=self._child.stdin, flush=True)
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.label} ended at: {case.name}")
        return Sample(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        self._child.communicate()


def main() -> None:
    """Answer cases, one JSON object a line, until there are no more."""
    label, cpu = sys.argv[1], int(sys.argv[2])
    os.sched_setaffinity(0, {cpu})
    if label == OURS:
        from tests.bench.scheduler.our_core import load_production_heap

        load_production_heap()
    side = LocalSide(label)
    for line in sys.stdin:
        print(json.dumps(asdict(side.measure(Case(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
