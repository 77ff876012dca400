"""Ends a process whose event loop stands still, so that Serve starts another one.

Serve asks its replicas for their health too, but gives one that is stopped, or that hangs, minutes:
it waits for answers, and then for an orderly end. A child of the process waits for beats from its
event loop instead, and kills it when they stay away. The child ends with its parent, and needs
neither Ray nor anything that is installed.
"""

import asyncio
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

BEATS = 12  # in the time after which a process is taken for hung
LAST_CHANCE = 0.25  # of that time: the whole machine may have stood still, the watchdog with it


class Watchdog:
    """Watches the process that it is made in, from `start` to `stop` or the process's end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds  # without a beat
        self._child: subprocess.Popen[bytes] | None = None
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; there must be a running event loop."""
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


def watch(pid: int, seconds: float, beats: int) -> bool:
    """Wait until beats stay away so long; False if they end instead, with the process."""
    last = seconds * LAST_CHANCE
    while True:
        if not (_comes(beats, seconds - last) or _comes(beats, last)):
            print(
                f"topwork: process {pid} has stood still for {seconds:g} s and is killed",
                file=sys.stderr,
                flush=True,
            )
            return True
        if not os.read(beats, 4096):
            return False


def _comes(beats: int, seconds: float) -> bool:
    return bool(select.select([beats], [], [], seconds)[0])


if __name__ == "__main__":
    PID = int(sys.argv[1])
    # A parent that has gone has closed its end of the pipe.
    if watch(PID, float(sys.argv[2]), sys.stdin.fileno()):
        os.kill(PID, signal.SIGKILL)
