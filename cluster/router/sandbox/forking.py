"""Work on what strangers sent, each piece in a process that ends with it.

The process that does it (`serve`) reads what it needs once and forks for each piece, so that work
without an end, that takes all memory, or that crashes, ends a process that nobody else needs, and
leaves nothing behind. `ForkingProcess` is that process as a router sees it.
"""

import gc
import os
import resource
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from time import monotonic
from typing import IO

MEMORY = 256 * 2**20  # bytes beside what the process takes anyway
_AT_ONCE = 2**20  # bytes of an answer
_NO_IDLE_CORES = 75  # exit code
_LENGTH = struct.Struct("<Q")
_SLOW = (signal.SIGALRM, signal.SIGPROF, signal.SIGXCPU, signal.SIGKILL)
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one piece of work may take."""

    seconds: float
    is_computing: bool = False  # the seconds are those of computing, and not of the clock
    stack: int | None = None  # bytes
    # Seconds in which it may be done on cores that nobody else wants, before it begins anew with
    # the priority of this process; None: it has that at once.
    idle_patience: float | None = None


def serve(
    work: Callable[[bytes], bytes],
    lost: Callable[[bool], bytes],
    limits: Limits,
    prepare: Callable[[bytes], None] = lambda _: None,
) -> None:
    """Answer each piece of work on stdin on stdout.

    Args:
        work: does it.
        lost: the answer for work that did not end; told whether it took too long.
        limits: of each piece.
        prepare: is called before it, in this process: what it imports is there for all pieces.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its router has gone
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    gc.freeze()
    _write_frame(answers, b"")  # that it is ready
    while (call := _read_frame(sys.stdin.buffer)) is not None:
        prepare(call)
        answer, is_slow = _done(work, call, limits, answers.fileno())
        _write_frame(answers, answer or lost(is_slow))


class ForkingProcess:
    """A process that runs `serve`; started by the first piece of work, and again if it has died.

    One thread at a time may use it.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command: Sequence[str] = (sys.executable, "-m", module, *arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Its number, None while there is none."""
        return None if self._process is None else self._process.pid

    def exchange(self, *call: bytes | bytearray) -> bytes | None:
        """Return what came of a piece of work, given in parts; None if the process has died."""
        if self._is_closed:
            return None
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            _write_frame(process.stdin, *call)
            answer = _read_frame(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            self.end()
        return answer

    def kill(self) -> None:
        """Let no more work be done; `end` is left to call when nothing is waited for."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Wait for the end of the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "both are pipes"
            with suppress(BrokenPipeError):
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _QUIET,
            start_new_session=True,
        )
        self._process = process
        assert process.stdout is not None, "a pipe"
        _read_frame(process.stdout)  # that it is ready; if it died, the call finds out
        return process


def _write_frame(stream: IO[bytes], *parts: bytes | bytearray) -> None:
    """Send bytes with their length before them."""
    stream.write(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        stream.write(part)
    stream.flush()


def _read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next bytes, None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def _done(
    work: Callable[[bytes], bytes], call: bytes, limits: Limits, answers: int
) -> tuple[bytes, bool]:
    """Return (what came of a call, empty if nothing did; whether that took too long)."""
    if limits.idle_patience is not None:
        outcome = _of_child(work, call, limits, answers, limits.idle_patience)
        if outcome is not None:
            return outcome
    outcome = _of_child(work, call, limits, answers)
    assert outcome is not None, "who has no patience waits"
    return outcome


def _of_child(
    work: Callable[[bytes], bytes],
    call: bytes,
    limits: Limits,
    answers: int,
    idle_patience: float | None = None,
) -> tuple[bytes, bool] | None:
    """Return what `_done` does, None if there was no time for it on idle cores.

    `answers` must end with this process, not with its child.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.close(answers)
            if idle_patience is not None and not _use_idle_cores():
                os._exit(_NO_IDLE_CORES)
            _limit(limits)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(work(call))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        answer = _read_until(pipe, None if idle_patience is None else monotonic() + idle_patience)
    if answer is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if answer is None or os.waitstatus_to_exitcode(status) == _NO_IDLE_CORES:
        return None
    if os.WIFSIGNALED(status):
        return b"", os.WTERMSIG(status) in _SLOW
    return answer, False


def _read_until(pipe: FileIO, deadline: float | None) -> bytes | None:
    """Return all that comes, None if that is not before a time."""
    parts: list[bytes] = []
    while True:
        left = None if deadline is None else max(0.0, deadline - monotonic())
        if not select.select([pipe], [], [], left)[0]:
            return None
        part = pipe.read(_AT_ONCE)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _use_idle_cores() -> bool:
    """Compute only where nobody else would; False where that cannot be had.

    A niced process has less of a core, but a thread that wakes up still waits until it has had its
    slice of some milliseconds: a rank's, at each of the many points of a step at which its threads
    meet. One under SCHED_IDLE gives way at once. Only a privileged process can leave it again.
    """
    if hasattr(os, "SCHED_IDLE"):  # only Linux has it
        with suppress(PermissionError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            return True
    return False


def _limit(limits: Limits) -> None:
    """Let this process take so much, and little else."""
    number, timer = signal.SIGALRM, signal.ITIMER_REAL
    if limits.is_computing:
        number, timer = signal.SIGPROF, signal.ITIMER_PROF
    signal.signal(number, signal.SIG_DFL)
    signal.setitimer(timer, limits.seconds)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    seconds = int(limits.seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.stack is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (limits.stack, limits.stack))
