"""Recordings of schedulers: the files of an event log, FILE and FILE.1 that came before it.

Owns appending, the buffer, and the bound: where FILE has reached half of it, FILE takes the place
of FILE.1 and a new one begins. What an earlier process has left is gone on with; a torn record at
its end is cut off. A recording must not harm what it records: when the disk refuses, the recording
ends and an error is logged.

A file that begins in the middle of a scheduler's life needs the state that the scheduler had then.
The scheduler itself never stops to tell it: a process of low priority replays the file before
(`cluster.engine.checkpoint`) and writes FILE.state.
"""

import fcntl
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.events import Event
from cluster.scheduler.kv_cache.events import CacheObserver
from cluster.scheduler.replay.event_log import (
    MAGIC,
    Begin,
    Continue,
    LogError,
    Record,
    TornLog,
    decode_record,
    encode_record,
    read_frames,
)
from cluster.scheduler.replay.journal import EventJournal
from cluster.scheduler.replay.plan_checksum import PlanChecksum
from cluster.scheduler.scheduler import Scheduler

logger = logging.getLogger("topwork.scheduler")

BUFFER_BYTES = 64 * 1024  # written at one go; the most that a killed process loses


def state_path(path: Path) -> Path:
    """Return where the state at the beginning of a file of events is kept."""
    return path.with_name(path.name + ".state")


class Checkpointer:
    """Has the state at the beginning of each file written, by a process of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the last state is being written still."""
        return self._process is not None and self._process.poll() is None

    def rotated(self, path: Path, older: Path, *, continues: bool) -> None:
        """Take the state of a file along that is `older` now; begin to write that of the next.

        `continues`: the next file goes on with the same scheduler, else it needs no state.
        """
        assert not self.is_busy, "a file is rotated before the state of the last one is there"
        if state_path(path).exists():
            os.replace(state_path(path), state_path(older))
        else:
            state_path(older).unlink(missing_ok=True)
        if continues:
            files = (str(older), str(state_path(path)))
            command = (sys.executable, "-m", "cluster.engine.checkpoint", *files)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class EventFile:
    """Appends records; belongs to one thread of one process.

    `checkpointer` keeps the scheduler's state at the beginning of each file.
    """

    def __init__(
        self, path: Path, max_bytes: int, checkpointer: "Checkpointer | None" = None
    ) -> None:
        """Open or make the file, which only its owner may read: it holds prompts.

        Raises:
            OSError: if it cannot be written, or another process is writing it.
            LogError: if it is something else than an event log.
        """
        self._path = path
        self._older = path.with_name(path.name + ".1")
        self._half_bytes = max_bytes // 2
        self._max_bytes = max_bytes
        self._checkpointer = checkpointer
        self._buffer = bytearray()
        self._size = 0  # of the file with the buffer
        self._last_number = 0
        self._file: FileIO | None = None  # None: the recording has ended
        self._go_on()

    @property
    def is_full(self) -> bool:
        """Whether it is time for `rotate`: not while the state of the file before is written."""
        if self._file is None or self._size < self._half_bytes:
            return False
        if self._checkpointer is None or not self._checkpointer.is_busy:
            return True
        if self._size >= self._max_bytes:
            self._give_up("the state of the file before takes too long to write")
        return False

    def rotate(self, *, continues: bool) -> None:
        """Begin a new file, with the scheduler of this one or with a new one."""
        self.flush()
        if self._file is not None:
            try:
                self._replace(self._file, continues=continues)
            except OSError as error:
                self._give_up(str(error))

    def write(
        self,
        event: Event | Begin | Continue,
        raised: str | None = None,
        outcome: PlanChecksum | int | None = None,
    ) -> None:
        """Append the next record, by and by; one of a call that failed at once."""
        if self._file is None:
            return
        self._last_number += 1
        frame = encode_record(Record(self._last_number, cast(Any, event), raised, outcome))
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
            self._give_up(str(error))

    def close(self) -> None:
        """Write what is left; later events go nowhere."""
        self.flush()
        if self._checkpointer is not None:
            self._checkpointer.close()
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
                self._replace(file, continues=False)
            elif end == 0:
                self._begin(file)
            else:
                file.truncate(end)
                self._size = end
        except (OSError, LogError):
            file.close()
            raise

    def _replace(self, file: FileIO, *, continues: bool) -> None:
        """Keep the file as the older one and begin another."""
        os.replace(self._path, self._older)
        if self._checkpointer is not None:
            self._checkpointer.rotated(self._path, self._older, continues=continues)
        self._file = _open(self._path)
        file.close()
        self._begin(self._file)

    def _begin(self, file: FileIO) -> None:
        file.truncate(0)
        _write_all(file, MAGIC)
        self._size = len(MAGIC)

    def _give_up(self, reason: str) -> None:
        logger.error("the recording in %s has ended: %s", self._path, reason)
        assert self._file is not None, "it has ended before"
        self._file.close()
        self._file = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingConfig:
    """What is written, and where."""

    path: str
    max_bytes: int  # of FILE and FILE.1 together
    version: str  # of topwork


class Recording:
    """The recording of one engine, through all groups of ranks; without a configuration, none."""

    def __init__(self, config: RecordingConfig | None) -> None:
        self._config = config
        self._file: EventFile | None = None

    def open(self) -> None:
        """Open the file, if there is to be one.

        Raises:
            OSError: if it cannot be written, or another process is writing it.
            LogError: if it is something else than an event log.
        """
        if self._config is not None:
            self._file = EventFile(Path(self._config.path), self._config.max_bytes, Checkpointer())

    def make_scheduler(self, config: SchedulerConfig, observer: CacheObserver) -> Scheduler:
        """Return the scheduler of a new group of ranks."""
        if self._config is None:
            return Scheduler(config, observer)
        assert self._file is not None, "open() comes first"
        journal = EventJournal(config, self._file, self._config.version)
        return Scheduler(config, observer, journal)

    def flush(self) -> None:
        """Write what is in the buffer."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write what is left and end."""
        if self._file is not None:
            self._file.close()


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
