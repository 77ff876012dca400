"""When a server is to end: at SIGINT, SIGTERM or SIGHUP, whichever of its threads gets it."""

import signal
import threading
from types import FrameType

LOOK_INTERVAL = 0.5  # seconds


def stop_on_signals() -> threading.Event:
    """Return what is set when the process is told to end; for the main thread to call."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    return stop


def wait_for(stop: threading.Event) -> None:
    """Return when `stop` is set; for the main thread to call, which alone runs signal handlers."""
    # A process that was halted may take a signal on any of its threads as it goes on, and the main
    # thread sleeps through it: it must look by itself.
    while not stop.wait(LOOK_INTERVAL):
        continue
