"""Ends a process whose event loop stands still, so that Serve starts another one.

Serve asks its replicas for their health too, but gives one that is stopped, or that hangs, minutes:
it waits for answers, and then for an orderly end. A child of the process waits for beats from its
event loop instead, and kills it when they stay away. The child ends with its parent, and needs
neither Ray nor anything that is installed.

A process that is ready to run and gets no CPU does not hang: on a host that is busy with something
else, as with the start of others, it is given more time. Where it stood is in its log.
"""

import asyncio
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BEATS = 12  # in the time after which a process is taken for hung
LAST_CHANCE = 0.25  # of that time: the whole machine may have stood still, the watchdog with it
STARVED = 0.25  # of a last chance without a CPU: then there is another one
MOST_CHANCES = 16  # five times as long as one that gets a CPU may stand still
TELL_STACKS = signal.SIGUSR2
SECONDS_TO_TELL = 0.2

Delays = dict[str, int]  # by thread, in nanoseconds


class Watchdog:
    """Watches the process that it is made in, from `start` to `stop` or the process's end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds  # without a beat
        self._child: subprocess.Popen[bytes] | None = None
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; there must be a running event loop."""
        faulthandler.register(TELL_STACKS, all_threads=True)
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(self._seconds)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        self._beating = asyncio.create_task(self._beat(self._child))

    def stop(self) -> None:
        """Watch no more."""
        if self._beating is not None:
            self._beating.cancel()
        if self._child is not None:
            with self._child as child:  # closes its input, at which it ends
                child.kill()

    async def _beat(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None, "it reads its standard input"
        with suppress(BrokenPipeError):  # somebody has killed it: nobody watches any more
            while True:
                os.write(child.stdin.fileno(), b".")
                await asyncio.sleep(self._seconds / BEATS)


def watch(
    pid: int, seconds: float, beats: int, delays: Callable[[int], Delays] | None = None
) -> bool:
    """Wait until beats stay away so long; False if they end instead, with the process.

    Args:
        pid: of the process.
        seconds: without a beat.
        beats: where they come in.
        delays: tells for how long its threads have waited for a CPU; None: `run_delays`.
    """
    last = seconds * LAST_CHANCE
    while True:
        if not _comes(beats, seconds - last) and _misses_last_chances(
            pid, last, beats, delays or run_delays
        ):
            print(
                f"topwork: process {pid} has stood still for {seconds:g} s and is killed",
                file=sys.stderr,
                flush=True,
            )
            return True
        if not os.read(beats, 4096):
            return False


def _misses_last_chances(
    pid: int, seconds: float, beats: int, delays: Callable[[int], Delays]
) -> bool:
    """Tell whether no beat comes while the process gets a CPU, or in `MOST_CHANCES`."""
    for _ in range(MOST_CHANCES):
        before = delays(pid)
        if _comes(beats, seconds):
            return False
        # Of the thread that waited the longest: it may hold what the loop waits for.
        waited = [now - before.get(thread, now) for thread, now in delays(pid).items()]
        if max(waited, default=0) < STARVED * seconds * 1e9:
            break
    return True


def run_delays(pid: int) -> Delays:
    """Return for how long each thread has been ready without a CPU; none if Linux does not tell.

    Source: Documentation/scheduler/sched-stats.rst of Linux, "/proc/<pid>/schedstat".
    """
    delays: Delays = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            delays[path.parent.name] = int(path.read_text().split()[1])
    return delays


def is_stopped(pid: int) -> bool:
    """Tell whether a signal has stopped a process, so that it can tell nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False


def _comes(beats: int, seconds: float) -> bool:
    return bool(select.select([beats], [], [], seconds)[0])


if __name__ == "__main__":
    PID = int(sys.argv[1])
    # A parent that has gone has closed its end of the pipe.
    if watch(PID, float(sys.argv[2]), sys.stdin.fileno()):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            if not is_stopped(PID):
                os.kill(PID, TELL_STACKS)
                time.sleep(SECONDS_TO_TELL)  # nothing says that it has, if it can
            os.kill(PID, signal.SIGKILL)
