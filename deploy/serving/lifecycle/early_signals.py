"""Lets a signal end `topwork serve` in order while Python still imports what it takes.

`deploy.cli` imports it first of all: nothing runs yet that would have to be taken down.
"""

import os
import signal
import sys
from types import FrameType

# What ends a server: supervisors send SIGTERM, a keyboard SIGINT, a terminal that closes SIGHUP.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end this process: not SIGHUP where `nohup` has switched it off."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [one for one in ENDING if not (is_nohup and one is signal.SIGHUP)]


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(0)


if sys.argv[1:2] == ["serve"]:
    for _one in ending_signals():
        signal.signal(_one, _end)
