"""What the kernel tells of processes that may end while they are looked at."""

import os
from pathlib import Path


def _told(pid: int, name: str) -> str:
    """Return what a file of a process says; nothing if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def title(pid: int) -> str:
    """Return how a process calls itself."""
    return _told(pid, "cmdline").replace("\0", " ").strip()


def program(pid: int) -> str:
    """Return the name of the program that a process runs."""
    return _told(pid, "comm").strip()


def runs(pid: int) -> bool:
    """Tell whether a process has not ended."""
    return _told(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


def resident_bytes(pids: set[int]) -> int:
    """Return how much memory processes have together, what they share counted for each."""
    told = [_told(pid, "statm").split() for pid in pids]
    return sum(int(fields[1]) for fields in told if fields) * os.sysconf("SC_PAGE_SIZE")


def family(pid: int) -> set[int]:
    """Return a process and everything that it and its descendants have started and that runs."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            fields = _told(int(entry.name), "stat").rpartition(")")[2].split()
            if fields and fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found
