"""`topwork serve` as two processes: one that takes the signals, and one that runs the server.

Ray sets handlers of its own for SIGTERM, in Python and in C++, that abort with a stack dump: a
process that has called `ray.init` cannot be ended in order. So the one that the user starts never
does. It forks the server before any thread runs, tells it what signals mean, and ends what is left
over when the server has ended, however it did. Should it die itself, the server notices at once and
ends everything.
"""

import ctypes
import os
import selectors
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from deploy.serving.lifecycle.early_signals import ENDING, ending_signals
from deploy.serving.lifecycle.leftovers import end_started
from deploy.serving.process_setup import lower_cpu_priority

DRAIN, END = b"d", b"e"  # orders: finish what runs first, or do not
READY = b"r"  # news
SAME_SIGNAL = 0.5  # seconds in which a second signal is the first one, sent to a group as well
REAP_TIMEOUT = 2.0  # seconds until the kernel has told of all that was ended
_PR_SET_CHILD_SUBREAPER = 36


class Orders:
    """What the server hears from the process that supervises it, and what it tells it."""

    def __init__(self, orders: int, news: int, mark: str) -> None:
        self.stop = threading.Event()
        self.drains = False  # whether what runs may end first
        self.is_ready = False
        self._orders, self._news, self._mark = orders, news, mark
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        while order := os.read(self._orders, 1):
            self.drains = order == DRAIN
            self.stop.set()
        # Nobody supervises this server any more.
        end_started(self._mark, os.getpid())
        shutil.rmtree(self._mark, ignore_errors=True)
        os._exit(1)

    def tell_ready(self) -> None:
        """Say that requests are served: from now on an end is one in order."""
        self.is_ready = True
        with suppress(BrokenPipeError):
            os.write(self._news, READY)

    def end_at_once(self, code: int) -> None:
        """End this process and all that it has started."""
        end_started(self._mark, os.getpid())
        sys.stdout.flush()
        os._exit(code)


def ignore_signals() -> None:
    """Leave signals to the supervising process; for the server to call after `ray.init`, too."""
    for number in ENDING:
        # Not SIG_IGN, which all that is started would inherit.
        signal.signal(number, _ignore)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def supervise(
    run: Callable[[Orders], int],
    *,
    mark: str,
    owns_cluster: bool,
    patience: float,
    say: Callable[[str], None],
) -> int:
    """Run a server in a process of its own until it ends; return the exit code.

    Args:
        run: the server; returns its exit code.
        mark: the directory that all its processes are marked with.
        owns_cluster: whether all that it starts may be killed while it is starting.
        patience: seconds from an order to stop until it has ended.
        say: shows a line about an end that nobody asked for.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    for number in (*ending_signals(), signal.SIGCHLD):
        signal.signal(number, _ignore)  # its number is written to the pipe
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    orders_read, orders_write = os.pipe()
    news_read, news_write = os.pipe()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the server come here
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for fd in (wake_read, wake_write, orders_write, news_read):
            os.close(fd)
        _run_server(run, orders_read, news_write, mark)
    os.close(orders_read)
    os.close(news_write)
    lower_cpu_priority()  # it only waits, and must not halt a rank when it wakes up
    server = _Server(pid, orders_write, owns_cluster, patience)
    try:
        return server.wait(wake_read, news_read, say)
    finally:
        end_started(mark, pid)
        server.reap_orphans()


def _run_server(run: Callable[[Orders], int], orders: int, news: int, mark: str) -> NoReturn:
    """Run the server in the forked process, and end that."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ignore_signals()
        os.setsid()  # signals of a terminal are not for Ray's processes
        code = run(Orders(orders, news, mark))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class _Server:
    """The server's process as its supervisor sees it."""

    def __init__(self, pid: int, orders: int, owns_cluster: bool, patience: float) -> None:
        self._pid, self._orders, self._owns_cluster = pid, orders, owns_cluster
        self._patience = patience
        self._is_ready = False
        self._status: int | None = None  # how it ended
        self._code: int | None = None  # what an end by force means
        self._ordered_at: float | None = None

    def wait(self, wake: int, news: int, say: Callable[[str], None]) -> int:
        """Return the exit code when the server has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(news, selectors.EVENT_READ)
            while self._status is None:
                for key, _ in selector.select(self._time_left()):
                    data = os.read(key.fd, 4096)
                    if key.fd == wake:
                        for number in data:
                            self._take(number)
                    elif data:
                        self._is_ready = True
                    else:
                        selector.unregister(news)
                if self._time_left() == 0 and self._code is None:
                    say(f"the server did not end within {self._patience:g} s: it was killed")
                    self._kill(1)
        if self._code is not None:
            return self._code
        code = os.waitstatus_to_exitcode(self._status)
        if code < 0:
            say(f"the server's process {self._pid} was ended by {signal.Signals(-code).name}")
            return 1
        return code

    def _time_left(self) -> float | None:
        if self._ordered_at is None or self._code is not None:
            return None
        return max(0.0, self._ordered_at + self._patience - time.monotonic())

    def _take(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif self._ordered_at is None:
            self._ordered_at = time.monotonic()
            if self._is_ready or not self._owns_cluster:
                with suppress(BrokenPipeError):
                    os.write(self._orders, DRAIN if number == signal.SIGTERM else END)
            else:
                self._kill(0)
        elif time.monotonic() > self._ordered_at + SAME_SIGNAL:
            self._kill(128 + number)

    def _kill(self, code: int) -> None:
        self._code = code
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _reap(self) -> bool:
        """Take note of children that have ended; return whether some are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._status = status

    def reap_orphans(self) -> None:
        """Let nothing of what has been ended stay in the kernel's table."""
        deadline = time.monotonic() + REAP_TIMEOUT
        while self._reap() and time.monotonic() < deadline:
            time.sleep(0.01)
