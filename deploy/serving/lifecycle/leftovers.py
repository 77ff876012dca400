"""Ends all that a server has started, wherever it hangs in the tree of processes.

A server's process begins a session, and has a mark in its environment. What it starts inherits both
and keeps them when a parent dies. Some begin sessions of their own, some write their title over
their environment, none does both. A cluster that was there before the server has neither.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "TOPWORK_SERVER"  # the environment variable
_INTERVAL, _PATIENCE = 0.01, 10.0  # seconds between two looks, and until they are given up


def started_processes(mark: str, session: int) -> set[int]:
    """Return the pids of the processes of a mark or a session that run; without this one."""
    entry = f"{MARK}={mark}".encode()
    found = set()
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # it has ended; it is no process; it is another user's
            state, _, _, its_session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            if state != "Z" and (
                int(its_session) == session
                or entry in (process / "environ").read_bytes().split(b"\0")
            ):
                found.add(int(process.name))
    return found - {os.getpid()}


def end_started(mark: str, session: int) -> set[int]:
    """Kill all processes of a mark or a session, and those they start meanwhile; return which."""
    found: set[int] = set()
    deadline = time.monotonic() + _PATIENCE
    while (left := started_processes(mark, session)) and time.monotonic() < deadline:
        found |= left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_INTERVAL)
    return found
