"""deploy.serving.terminal: a server ends whichever of its threads is told to."""

import subprocess
import sys

import pytest

from tests.patience import PATIENCE

_SERVER = """
import signal, sys, threading, time
from deploy.serving.terminal import stop_on_signals, wait_for

stop = stop_on_signals()
other = threading.Thread(target=time.sleep, args=(60,), daemon=True)
other.start()

def tell():
    time.sleep(0.5)  # until the main thread waits
    signal.pthread_kill({thread}.ident, signal.{name})

threading.Thread(target=tell, daemon=True).start()
wait_for(stop)
"""


@pytest.mark.parametrize("thread", ["threading.main_thread()", "other"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_any_thread_ends_the_wait(thread: str, name: str) -> None:
    script = _SERVER.format(thread=thread, name=name)
    subprocess.run([sys.executable, "-c", script], timeout=PATIENCE, check=True)
