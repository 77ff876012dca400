"""Writes the request log: a thread of its own, so that no call ever waits for a disk or a pipe.

Entries wait in a queue of bounded length. What has no room there, or cannot be written, is lost and
counted. Several routers of a host may write one file: each batch of lines is one write to its end.
A file that was renamed or deleted, as logrotate does, is made anew under its name.
"""

import asyncio
import logging
import os
import stat
import sys
from collections.abc import Callable, Sequence
from queue import Full, Queue
from threading import Thread

from cluster.router.config import STANDARD_ERROR
from cluster.router.json_line import json_line
from cluster.router.request_log.entry import RequestEntry

logger = logging.getLogger("topwork.router")

MAX_WAITING = 10_000  # entries
MAX_BATCH = 256  # lines of one write
CLOSE_TIMEOUT = 5.0  # seconds that the lines of the last calls may take
MODE = 0o640


class RequestLog:
    """The lines of one router; `put` belongs to its event loop.

    `on_loss` is called on the loop with how many lines were lost, `decode` in the thread.
    """

    def __init__(
        self,
        target: str,
        on_loss: Callable[[int], None],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """Open the file, or take standard error.

        Raises:
            OSError: if it cannot be written.
        """
        self._target = None if target == STANDARD_ERROR else target
        self._on_loss = on_loss
        self._decode = decode
        self._queue: Queue[RequestEntry | None] = Queue(MAX_WAITING)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_failing = False
        # Serve replaces sys.stderr of replicas; what was there first reaches Ray's logs.
        self._file = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
        if self._target is not None:
            self._file = _opened(self._target)
        self._thread = Thread(target=self._run, name="request log", daemon=True)

    def start(self) -> None:
        """Begin to write; belongs to the event loop that runs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def put(self, entry: RequestEntry) -> None:
        """Hand over a call that has ended; nothing waits."""
        try:
            self._queue.put_nowait(entry)
        except Full:
            self._on_loss(1)

    def close(self) -> None:
        """Write what was handed over and close the file; may take a while."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=CLOSE_TIMEOUT)
            except Full:
                return  # a disk or a pipe that stands still: the thread ends with the process
            self._thread.join(CLOSE_TIMEOUT)
        if self._target is not None and not self._thread.is_alive():
            os.close(self._file)

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            entries = [entry for entry in batch if entry is not None]
            if entries:
                self._write(entries)
            if None in batch:
                return

    def _write(self, entries: Sequence[RequestEntry]) -> None:
        data = b"".join(self._line(entry) for entry in entries)
        try:
            if self._target is not None:
                self._file = _followed(self._target, self._file)
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if not self._is_failing:
                logger.error("the request log cannot be written: %s", error)
            self._is_failing = True
            self._lose(len(entries))
        else:
            self._is_failing = False

    def _line(self, entry: RequestEntry) -> bytes:
        return json_line(entry.fields(self._decode)).encode() + b"\n"

    def _lose(self, count: int) -> None:
        assert self._loop is not None, "start() comes first"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_loss, count)


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)


def _followed(path: str, file: int) -> int:
    """Return the file that has the name now, which is made if there is none."""
    own = os.fstat(file)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    if there is not None and (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino):
        return file
    if there is not None and not stat.S_ISREG(there.st_mode):
        return file  # a pipe or a device that was opened stays open
    new = _opened(path)
    os.close(file)
    return new
