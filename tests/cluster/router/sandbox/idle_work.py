"""Answers each piece of work with how it was scheduled.

`python -m tests.cluster.router.sandbox.idle_work SECONDS` gives idle cores so long, and they never
come to a call that says so.
"""

import os
import sys
import time

from cluster.router.sandbox.forking import Limits, serve
from tests.patience import PATIENCE

NICENESS, LARGE = 7, 300_000
STARVED = b"starved"


def _work(call: bytes) -> bytes:
    is_idle = os.sched_getscheduler(0) == os.SCHED_IDLE
    if is_idle and call == STARVED:
        time.sleep(PATIENCE)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    return f"{is_idle} {niceness} ".encode() + b"x" * LARGE


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(_work, lambda is_slow: b"lost", Limits(PATIENCE, idle_patience=float(sys.argv[1])))
