"""What a server does when its own Ray cluster is lost.

Nothing replaces the GCS or the raylet of a server, and without them nothing else that dies is
replaced: the server refuses calls from then on, lets those end that run, and ends itself, so that
whoever supervises it starts it again.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from ray._private import ray_constants, worker
from rich.console import Console

from deploy.serving.haproxy.admin import num_in_flight, refuse_calls
from deploy.serving.lifecycle.supervisor import Orders

LOST = 3  # the exit code
INTERVAL = 0.2  # seconds between two looks
ORDER_PATIENCE = 0.5  # seconds in which the order to stop may come: some signal all processes
MAX_DRAIN = 45.0  # seconds: a minute after the GCS, Ray's processes end themselves
_VITAL = {
    ray_constants.PROCESS_TYPE_GCS_SERVER: "GCS",
    ray_constants.PROCESS_TYPE_RAYLET: "raylet",
}


class ClusterWatch:
    """Looks after the processes that `ray.init` has started here, until it is told to stop."""

    def __init__(self, orders: Orders, mark: str, drain_timeout: float, console: Console) -> None:
        self._orders = orders
        self._directory = Path(mark)
        self._drain_timeout = min(drain_timeout, MAX_DRAIN)
        self._console = console
        self._pids = _vital_pids()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="cluster watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more: what is watched is taken down."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL):
            for name, pid in self._pids.items():
                if has_ended(pid) and not self._stopped.is_set():
                    self._end(f"Ray's {name} (pid {pid}) has died, and nothing replaces it")
                    return

    def _end(self, reason: str) -> None:
        if self._orders.stop.wait(ORDER_PATIENCE):
            self._orders.end_at_once(0)
        if not self._orders.is_ready:
            self._say(f"{reason}: the start is broken off")
        else:
            self._say(
                f"{reason}: calls are refused, those that run have {self._drain_timeout:g} s, "
                f"then this server ends with exit code {LOST}"
            )
            with suppress(OSError):
                refuse_calls(self._directory)
                self._wait_for_calls()
        self._orders.end_at_once(LOST)

    def _wait_for_calls(self) -> None:
        deadline = time.monotonic() + self._drain_timeout
        while num_in_flight(self._directory) and time.monotonic() < deadline:
            if self._orders.stop.wait(INTERVAL):
                return

    def _say(self, text: str) -> None:
        with suppress(OSError):  # a terminal that is gone
            self._console.print(f"[bold red]error[/] {text}", highlight=False, soft_wrap=True)


def _vital_pids() -> dict[str, int]:
    node = worker._global_node
    assert node is not None, "ray.init has returned"
    return {name: node.all_processes[kind][0].process.pid for kind, name in _VITAL.items()}


def has_ended(pid: int) -> bool:
    """Tell whether a child has ended, and leave it as it is.

    Ray's workers go on as long as the raylet is there, be it dead, and end what they do: streams
    would be cut if anyone took note of its end.
    """
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
