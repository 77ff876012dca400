"""What each process of a cluster sets for itself: its log level and its claim to the CPU cores."""

import gc
import logging
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# What of Ray's CPUs a process takes: they are counted, not given, and cores are shared. A
# scheduler, a rank on a CPU and a router take one each, but for what the adapter pool takes: else
# it would keep the last of them from nodes that they fill.
ONE_CPU, POOL_CPU = 0.99, 0.01
NICENESS = 10  # more than others have, of a process that yields its cores; 19 is the most
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class LineFormatter(logging.Formatter):
    """Begins one line for each record: nothing that a message quotes can forge another one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the first line, with control characters spelled out."""
        return _CONTROLS.sub(_spelled, super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return a traceback whose lines are all indented."""
        text = super().formatException(ei)
        return "\n".join(f"  {_CONTROLS.sub(_spelled, line)}" for line in text.split("\n"))


def _spelled(control: re.Match[str]) -> str:
    return f"\\x{ord(control[0]):02x}"


def set_log_level(level: str) -> None:
    """Let Topwork's own loggers write this much to standard error, which Ray collects."""
    logger = logging.getLogger("topwork")
    logger.setLevel(level)
    if not logger.handlers:
        # Serve gives what replicas write to sys.stderr to its own logger, which drops it.
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(LineFormatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def give_way_soon() -> None:
    """Let threads of this process hand the interpreter over after a millisecond, and not five.

    The objects that are there by now are left out of what the garbage collector looks through.
    """
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()


def lower_cpu_priority() -> None:
    """Let this thread, and all threads and processes that it starts, interrupt no other.

    A thread that wakes up interrupts one that runs, for some microseconds; but the threads of a
    rank work in step, so that an interruption of one halts all. Under SCHED_BATCH a process waits
    for a free core, or for the next tick of the kernel's clock. Only ranks, and schedulers, for
    whose plans ranks wait, take their priority back.
    """
    _set_policy("SCHED_BATCH")


def restore_cpu_priority() -> None:
    """Give this thread, and all that it starts, the priority that threads have by default."""
    _set_policy("SCHED_OTHER")


def yield_cores() -> None:
    """Let all threads of this process, and what they start, have what others leave of the cores.

    For the adapter pool: a step takes longer by what a load takes of a core that one of its threads
    must share. Where ranks fill all cores, the pool's calls wait longer for it.
    """
    for task in Path("/proc/self/task").iterdir() if sys.platform == "linux" else ():
        thread = int(task.name)
        with suppress(ProcessLookupError):  # one that has ended meanwhile
            # Nicer than it is: to be less nice than whoever started the server takes privileges.
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _set_policy(policy: str) -> None:
    if hasattr(os, policy):  # only Linux has them
        with suppress(PermissionError):  # a sandbox may forbid it; then all are equals
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
