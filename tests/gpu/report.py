"""Runs cases and writes down what they found, as it comes.

Owns the file of results, the clock of the whole run and what is said of a case that failed; a case
is any function that returns what it found or raises.
"""

import json
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Finding = dict[str, Any]
Case = tuple[str, Callable[[], Finding]]

RESULTS = "results.jsonl"
LOST = 3  # exit status of a process whose device answers no more: another one goes on
_LOST_SIGNS = ("illegal memory access", "misaligned address", "device-side assert", "unspecified")


class DeviceLost(Exception):
    """A kernel broke the device's context; nothing can run in this process any more."""


class Report:
    """The results under a folder, to which several processes add one after the other."""

    def __init__(
        self, folder: Path, deadline: float, seed: int, tidy: Callable[[], None] | None = None
    ) -> None:
        """Take up where the last process stopped.

        Args:
            folder: where to.
            deadline: by `time.time()`; cases that would begin later are not run.
            seed: of all random numbers.
            tidy: called after each case.
        """
        self._path = folder / RESULTS
        self._deadline = deadline
        self._seed = seed
        self._tidy = tidy
        self._begun = {(line["section"], line["name"]) for line in read(folder)}

    def add(self, section: str, name: str, status: str, finding: Finding) -> None:
        """Write one result."""
        self._write({"section": section, "name": name, "status": status, **finding})

    def run(self, section: str, cases: Sequence[Case]) -> None:
        """Run those cases that no process has begun before.

        Raises:
            DeviceLost: if the rest needs a new process.
        """
        for name, work in cases:
            if (section, name) in self._begun:
                continue
            if time.time() > self._deadline:
                self.add(section, name, "no time", {})
                continue
            self._write({"section": section, "name": name, "status": "begun"})
            self._run_one(section, name, work)
            if self._tidy is not None:
                self._tidy()

    def _run_one(self, section: str, name: str, work: Callable[[], Finding]) -> None:
        torch.manual_seed(zlib.crc32(f"{section} {name}".encode()) + self._seed)
        start = time.perf_counter()
        try:
            finding = work()
            status = finding.pop("status", "ok")
        except Exception as error:  # whatever it is, it is this case's result, and others follow
            status, finding = "failed", {"why": _why(error)}
            traceback.print_exc()
        finding["seconds"] = round(time.perf_counter() - start, 2)
        self.add(section, name, status, finding)
        shown = {key: value for key, value in finding.items() if key != "seconds"}
        print(f"{finding['seconds']:7.1f} s  {status:8} {section}: {name}  {shown}", flush=True)
        if status == "failed" and any(sign in finding["why"] for sign in _LOST_SIGNS):
            raise DeviceLost(name)

    def _write(self, line: Finding) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(folder: Path) -> list[Finding]:
    """Return all lines of the results so far; another process may be about to write one."""
    path = folder / RESULTS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def results(folder: Path) -> list[Finding]:
    """Return the result of each case; one that was begun and never ended has failed."""
    last: dict[tuple[str, str], Finding] = {}
    for line in read(folder):
        last[line["section"], line["name"]] = line
    for line in last.values():
        if line["status"] == "begun":
            line |= {"status": "failed", "why": "its process ended"}
    return list(last.values())


def _why(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(where.filename).name
    return f"{type(error).__name__}: {str(error)[:400]} ({file}:{where.lineno})"
