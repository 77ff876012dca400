"""The files of an event log: FILE, and FILE.1 that came before it.

Owns appending, the buffer, and the bound: where FILE has reached half of it, FILE takes the place
of FILE.1 and a new one begins. What an earlier process has left is gone on with; a torn record at
its end is cut off. A recording must not harm what it records: when the disk refuses, the recording
ends and an error is logged. Knows nothing of what events mean.
"""

import fcntl
import logging
import os
from io import FileIO
from pathlib import Path

from cluster.scheduler.replay.event_log import (
    MAGIC,
    LogError,
    TornLog,
    decode_record,
    encode_record,
    read_frames,
)
from cluster.scheduler.replay.events import Event, Record

logger = logging.getLogger("topwork.scheduler")

BUFFER_BYTES = 64 * 1024  # written at one go; the most that a killed process loses


class EventFile:
    """Appends records; belongs to one thread of one process."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open or make the file, which only its owner may read: it holds prompts.

        Raises:
            OSError: if it cannot be written, or another process is writing it.
            LogError: if it is something else than an event log.
        """
        self._path = path
        self._older = path.with_name(path.name + ".1")
        self._half_bytes = max_bytes // 2
        self._least_bytes = 0  # a file grows to twice what it began with, however small the bound
        self._buffer = bytearray()
        self._size = 0  # of the file with the buffer
        self._last_number = 0
        self._file: FileIO | None = None  # None: the recording has ended
        self._go_on()

    @property
    def is_full(self) -> bool:
        """Whether it is time for `turn`."""
        return self._file is not None and self._size >= max(self._half_bytes, self._least_bytes)

    def turn(self) -> None:
        """Begin a new file; the next event must be one that a file can begin with."""
        self.flush()
        if self._file is not None:
            try:
                self._replace(self._file)
            except OSError as error:
                self._give_up(error)

    def write(self, event: Event, raised: str | None = None) -> None:
        """Append the next record, by and by; one of a call that failed at once."""
        if self._file is None:
            return
        self._last_number += 1
        frame = encode_record(Record(self._last_number, event, raised))
        if self._size == len(MAGIC):
            self._least_bytes = 2 * (self._size + len(frame))
        self._buffer += frame
        self._size += len(frame)
        if len(self._buffer) >= BUFFER_BYTES or raised is not None:
            self.flush()

    def flush(self) -> None:
        """Write what is in the buffer: done whenever there is nothing else to do."""
        if self._file is None or not self._buffer:
            return
        buffer, self._buffer = self._buffer, bytearray()
        try:
            _write_all(self._file, buffer)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is left; later events go nowhere."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _go_on(self) -> None:
        """Open the file and find the end of what is there."""
        self._file = file = _open(self._path)
        try:
            end, self._last_number, is_damaged = _scan(self._path)
            if self._last_number == 0 and self._older.exists():
                self._last_number = _scan(self._older)[1]
            if is_damaged:
                logger.warning("%s is damaged; it is kept as %s", self._path, self._older)
                self._replace(file)
            elif end == 0:
                self._begin(file)
            else:
                file.truncate(end)
                self._size = end
        except (OSError, LogError):
            file.close()
            raise

    def _replace(self, file: FileIO) -> None:
        """Keep the file as the older one and begin another."""
        os.replace(self._path, self._older)
        self._file = _open(self._path)
        file.close()
        self._begin(self._file)

    def _begin(self, file: FileIO) -> None:
        file.truncate(0)
        _write_all(file, MAGIC)
        self._size = len(MAGIC)

    def _give_up(self, error: OSError) -> None:
        logger.error("the recording in %s has ended: %s", self._path, error)
        assert self._file is not None, "it has ended before"
        self._file.close()
        self._file = None


def _open(path: Path) -> FileIO:
    """Open a file for appending, for this process alone."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    file = FileIO(descriptor, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise OSError(f"{path} cannot be locked; is another process writing it?") from error
    return file


def _write_all(file: FileIO, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _scan(path: Path) -> tuple[int, int, bool]:
    """Return (end of the last whole record, its number, whether the file is damaged behind it).

    Raises:
        LogError: if it is something else than an event log.
    """
    end, last, is_damaged = 0, None, False
    with path.open("rb") as stream:
        try:
            for offset, payload in read_frames(stream):
                end, last = stream.tell(), (payload, offset)
        except TornLog as torn:
            end = torn.offset
        except LogError as error:
            if error.offset == 0:
                raise
            is_damaged = True
    return end, 0 if last is None else decode_record(*last).number, is_damaged
