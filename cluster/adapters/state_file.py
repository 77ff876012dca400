"""A file of entries that outlive their process: what has been written is on the disk.

After a first line that says what the file is, each line is one change: the CRC-32 of what follows,
in hex, then JSON with the change's number, the entries that it puts and the names of those that it
drops. Changes are written one at a time, so a crash can tear only the last line, which is cut off.
When most of a file is outdated, a new one is written beside it, and takes its place when it is
whole.
"""

import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

logger = logging.getLogger("topwork.pool")

MAGIC = b"topwork adapter state 1\n"
ENTRIES_PER_LINE = 256  # of a file that is written anew
MIN_OUTDATED = 256  # entries; fewer are not worth a new file


class StateError(Exception):
    """A file that cannot be used, with the reason and what to do about it."""


class StateLocked(StateError):
    """Another process has the file."""


class StateFile:
    """Entries by name, whose values are what JSON can say; belongs to one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it; only its owner may read it.

        Raises:
            StateLocked: if another process has it.
            StateError: if it cannot be opened, is something else, or is damaged.
        """
        self._path = Path(os.path.realpath(path))
        self._new = self._path.with_name(self._path.name + ".new")
        self._is_doubtful = False  # whether the end of the file may be torn
        self._last_number = 0
        self._num_written = 0  # entries that were put or dropped in this file
        self._limit = 0  # of them, until the file is written anew, if that failed before
        try:
            self._descriptor = _open(self._path)
            try:
                self._read()
            except BaseException:
                os.close(self._descriptor)
                raise
        except OSError as error:
            raise StateError(f"adapter state {path} cannot be used: {error.strerror}") from error

    def write(self, put: Mapping[str, Any], drop: Iterable[str] = ()) -> None:
        """Change entries; on return that is on the disk.

        Raises:
            OSError: if it is not. The entries have changed, and the next call writes all of them.
        """
        drop = list(drop)
        self.entries.update(put)
        for name in drop:
            self.entries.pop(name, None)
        if self._is_doubtful:
            self._rewrite()
            return
        line = _line(self._last_number + 1, put, drop)
        self._is_doubtful = True  # until it is there
        _write_all(self._descriptor, line)
        os.fdatasync(self._descriptor)
        self._is_doubtful = False
        self._last_number += 1
        self._num_written += len(put) + len(drop)
        if self._num_written > max(self._limit, 2 * len(self.entries) + MIN_OUTDATED):
            self._compact()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _read(self) -> None:
        """Take in what is there, cut off a torn end, and clear away an unfinished new file."""
        with open(self._descriptor, "rb", closefd=False) as file:
            data = file.read()
        self._new.unlink(missing_ok=True)
        self.entries, end, self._last_number, self._num_written = _parse(data, self._path)
        if end == 0:
            self._rewrite()
            return
        if end < len(data):
            logger.warning("%s: %d bytes of a torn change cut off", self._path, len(data) - end)
            os.ftruncate(self._descriptor, end)
            os.fsync(self._descriptor)

    def _compact(self) -> None:
        """Write a new file if there is room for one; else the old one goes on growing."""
        try:
            self._rewrite()
        except OSError as error:
            logger.warning("%s cannot be written anew: %s", self._path, error)
            self._limit = 2 * self._num_written

    def _rewrite(self) -> None:
        """Put a new file in the place of the old one."""
        self._new.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
        descriptor = os.open(self._new, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before it has the name
            data, last_number = _whole(self.entries)
            _write_all(descriptor, data)
            os.fsync(descriptor)
            os.replace(self._new, self._path)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._last_number = descriptor, last_number
        self._num_written, self._limit = len(self.entries), 0
        # A crash before this may bring the old file back, which has all but what is written now.
        self._is_doubtful = True
        _sync_directory(self._path.parent)
        self._is_doubtful = False


def read_entries(path: Path) -> dict[str, Any]:
    """Return the entries of a file that is there, without changing or locking it.

    Raises:
        StateError: if it is something else, or damaged.
    """
    try:
        return _parse(path.read_bytes(), path)[0]
    except OSError as error:
        raise StateError(f"adapter state {path} cannot be read: {error.strerror}") from error


def _open(path: Path) -> int:
    """Open a file for this process alone."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StateError(f"adapter state {path} is not a regular file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), status):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise StateLocked(
                f"adapter state {path} is in use by another adapter pool: each server needs a file "
                "of its own"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever had it has put a new file in its place


def _parse(data: bytes, path: Path) -> tuple[dict[str, Any], int, int, int]:
    """Return (entries, end of the last whole line, its number, entries written up to there).

    The end is 0 if nothing was ever written.

    Raises:
        StateError: if it is something else, or damaged before its end.
    """
    if not data:
        return {}, 0, 0, 0
    if not data.startswith(MAGIC):
        raise StateError(
            f"adapter state {path} was not written by this version of topwork; it is left as it "
            "is: name another file"
        )
    entries: dict[str, Any] = {}
    end, number, num_written = len(MAGIC), 0, 0
    for line in data[end:].splitlines(keepends=True):
        change = _decode(line)
        if change is None:
            _refuse_damage(data, end, number, path)
            break
        if change["number"] != number + 1:
            raise _damaged(path, number, end, f"changes from {number + 1} are missing")
        entries.update(change["put"])
        for name in change["drop"]:
            entries.pop(name, None)
        number, end = number + 1, end + len(line)
        num_written += len(change["put"]) + len(change["drop"])
    return entries, end, number, num_written


def _refuse_damage(data: bytes, end: int, number: int, path: Path) -> None:
    """Raise if there are whole changes behind one that is none: it was not torn by a crash."""
    for found in re.compile(rb"[0-9a-f]{8} \{").finditer(data, end):
        line = data[found.start() : data.find(b"\n", found.start()) + 1]
        if _decode(line) is not None:
            raise _damaged(path, number, end, "it is damaged, and changes behind it are whole")


def _damaged(path: Path, number: int, offset: int, reason: str) -> StateError:
    return StateError(
        f"adapter state {path}, line {number + 2} at byte {offset}: {reason}. Put a copy of the "
        "file in its place, or move it away: then only what the configuration names is served"
    )


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return the change in a line, None if it is not whole."""
    checksum, _, text = line.partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % crc32(text):
        return None
    change: dict[str, Any] = json.loads(text)
    return change


def _line(number: int, put: Mapping[str, Any], drop: list[str]) -> bytes:
    change = {"number": number, "put": dict(put), "drop": drop}
    text = json.dumps(change, separators=(",", ":")).encode() + b"\n"
    return b"%08x %b" % (crc32(text), text)


def _whole(entries: Mapping[str, Any]) -> tuple[bytes, int]:
    """Return a file of these entries, and the number of its last line."""
    items = list(entries.items())
    parts = (items[at : at + ENTRIES_PER_LINE] for at in range(0, len(items), ENTRIES_PER_LINE))
    lines = [_line(number, dict(part), []) for number, part in enumerate(parts, 1)]
    return MAGIC + b"".join(lines), len(lines)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
