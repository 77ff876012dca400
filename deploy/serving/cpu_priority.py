"""Who waits for whom where ranks compute on cores that everybody shares: all others for them.

Whoever wakes up halts whoever runs, for some microseconds; but the threads of a rank go hand in
hand, so that one that is halted halts all. Linux lets processes run without this right: they wait
for a core to be left, or for the next tick of its clock. Only schedulers, for whose plans ranks
wait, keep it beside ranks.
"""

import os
from contextlib import suppress


def give_way() -> None:
    """Let this thread, and all threads and processes that it starts, halt nobody."""
    _follow("SCHED_BATCH")


def go_first() -> None:
    """Let this thread, and all that it starts, be as threads are that nobody has asked to wait."""
    _follow("SCHED_OTHER")


def _follow(policy: str) -> None:
    if hasattr(os, policy):  # not everywhere is Linux
        with suppress(PermissionError):  # a sandbox may forbid it; then all are equals
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
