"""A process and all that it started: the memory they hold, the CPU time they used, a pause of all.

Linux only, as the servers are.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
_PARENT, _SESSION, _USER, _SYSTEM = 1, 3, 11, 12  # fields of /proc/PID/stat after the name


class ProcessTree:
    """The descendants of one process, and whoever is in its session."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def pids(self) -> set[int]:
        """Return the processes that live now; nothing is left of one that has ended."""
        return _family(self._pid, _stats())

    def cpu_seconds(self) -> dict[int, float]:
        """Return the CPU time so far, by pid."""
        stats = _stats()
        return {
            pid: (int(stats[pid][_USER]) + int(stats[pid][_SYSTEM])) / TICKS
            for pid in _family(self._pid, stats)
        }

    def memory_bytes(self) -> int:
        """Return the bytes in memory; what several processes share counts once (their PSS)."""
        return sum(map(_proportional_bytes, self.pids()))

    def pause(self) -> None:
        """Stop all of it where it is."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all of it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End all of it at once."""
        self._signal(signal.SIGKILL)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause it until the block ends."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let a paused one go on until the block ends."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def _signal(self, number: signal.Signals) -> None:
        done: set[int] = set()
        while new := self.pids() - done:  # who forks meanwhile is not forgotten
            for pid in sorted(new):
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)
            done |= new


def _family(root: int, stats: dict[int, list[str]]) -> set[int]:
    # By session too: a child outlives its parent, and then has another.
    family = {pid for pid, fields in stats.items() if int(fields[_SESSION]) == root}
    family |= {root} & stats.keys()
    while grown := {pid for pid, s in stats.items() if int(s[_PARENT]) in family} - family:
        family |= grown
    return family


def _stats() -> dict[int, list[str]]:
    """Return the fields of /proc/PID/stat after the name, by pid."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    return stats


def _proportional_bytes(pid: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
