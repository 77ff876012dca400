"""Ends a node's HAProxy when its raylet is gone: `python guard.py RAYLET_PID FOLDER`.

HAProxy goes on without its manager, so that streams do; without a raylet there never is another
manager, and HAProxy would hold the port. FOLDER is that of its configuration. One guard for each
stays, however often the manager is started anew. It is a program of its own, and imports nothing
but Python's own modules.
"""

import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

INTERVAL = 0.5  # seconds between two looks


def is_alive(pid: int) -> bool:
    """Tell whether a process is there; one that has ended counts until its parent knows."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def users_of(folder: str) -> list[int]:
    """Return the pids of the processes that were started with a file of a folder."""
    start = f"{folder}/".encode()
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(start) for word in words):
                found.append(int(process.name))
    return found


def guard(raylet: int, folder: str) -> None:
    """Wait for the end of the raylet, then end what it has left; no second one waits."""
    with open(f"{folder}/guard.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        while is_alive(raylet):
            time.sleep(INTERVAL)
        for pid in users_of(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
