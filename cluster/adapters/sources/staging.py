"""The folder of adapters that came without a directory of their own.

Each is a sub-directory that is named by the SHA-256 of its two files, and has that name only once
both are whole and on the disk. What arrives is written beside it, under another name. What of it is
needed is not known here. Blocks on the disk, so call it in a thread.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
from hashlib import sha256
from io import BufferedWriter, FileIO
from itertools import count
from pathlib import Path
from threading import Lock

from cluster.adapters.peft.checks import CONFIG, MAX_CONFIG_BYTES, WEIGHTS
from cluster.errors import InvalidAdapter, InvalidRequest, Overloaded, Unavailable

logger = logging.getLogger("topwork.pool")

LOCK = ".lock"
RETRY_AFTER = 5  # seconds until some of what is arriving has come
_INCOMING = "incoming-"
_STAGED = re.compile(r"[0-9a-f]{64}")


class StagingLocked(Exception):
    """Another process has the folder."""


class IncomingRoom:
    """How many bytes of weights a folder holds of all adapters that are arriving."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._num_held = 0
        self._lock = Lock()

    def check(self, num_bytes: int) -> None:
        """Raise Overloaded unless so many bytes more would fit now."""
        if self._num_held + num_bytes > self.size:
            raise Overloaded(
                f"{self._num_held} bytes of adapters are arriving, and {num_bytes} more would be "
                f"over the limit of {self.size}",
                retry_after=RETRY_AFTER,
            )

    def take(self, num_bytes: int) -> None:
        """Hold so many bytes more; raises as `check`."""
        with self._lock:
            self.check(num_bytes)
            self._num_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Hold so many bytes less."""
        with self._lock:
            self._num_held -= num_bytes


class Incoming:
    """One adapter that is arriving; `max_bytes` of its weights are taken at most."""

    def __init__(self, folder: Path, max_bytes: int, room: IncomingRoom) -> None:
        self._room = room
        self._num_held = 0
        self.num_bytes = 0
        self.digest = ""  # of both files, once sealed
        self._folder = folder
        self._max_bytes = max_bytes
        self._sum = sha256()
        folder.mkdir(mode=0o700)
        self._file = BufferedWriter(FileIO(folder / WEIGHTS, "xb"))

    @property
    def folder(self) -> Path:
        """Where it is until it has its place."""
        return self._folder

    def write(self, data: bytes) -> None:
        """Take in the next bytes of the weights.

        Raises:
            InvalidAdapter: if they are more than may come.
            Overloaded: if too much is arriving, of all adapters together.
            Unavailable: if the disk does not take them.
        """
        check_size(self.num_bytes + len(data), self._max_bytes)
        self._room.take(len(data))
        self._num_held += len(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise unwritable(error) from error
        self._sum.update(data)
        self.num_bytes += len(data)

    def head(self, num_bytes: int) -> bytes:
        """Return the first bytes of the weights.

        Raises:
            Unavailable: if the disk does not take what has come so far.
        """
        try:
            self._file.flush()
            with open(self._folder / WEIGHTS, "rb") as file:
                return file.read(num_bytes)
        except OSError as error:
            raise unwritable(error) from error

    def seal(self, config: bytes, checksum: str | None) -> None:
        """Have both files whole and on the disk; `checksum` is what the weights must have, in hex.

        Raises:
            InvalidAdapter: if they have another one, or the configuration is too large.
            Unavailable: if the disk does not take them.
        """
        found = self._sum.hexdigest()
        if checksum is not None and found != checksum.lower():
            raise InvalidAdapter(
                f"the weights that came have the SHA-256 {found}, not {checksum.lower()}", "sha256"
            )
        if len(config) > MAX_CONFIG_BYTES:
            raise InvalidAdapter(
                f"{CONFIG} takes {len(config)} bytes, over the limit of {MAX_CONFIG_BYTES}"
            )
        try:
            with self._file as weights:
                weights.flush()
                os.fsync(weights.fileno())
            with open(self._folder / CONFIG, "xb") as file:
                file.write(config)
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self._folder)
        except OSError as error:
            raise unwritable(error) from error
        self.digest = sha256(sha256(config).digest() + self._sum.digest()).hexdigest()

    def discard(self) -> None:
        """Delete what has arrived, unless it has been placed."""
        with contextlib.suppress(OSError):  # a full disk refuses what is left in the buffer, too
            self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._room.give_back(self._num_held)
        self._num_held = 0


class StagingFolder:
    """One process at a time has it; its methods but `incoming` come from one thread at a time."""

    def __init__(self, path: Path, max_incoming: int) -> None:
        self.path = Path(os.path.realpath(path))
        self.room = IncomingRoom(max_incoming)
        self._numbers = count(1)
        self._lock: int | None = None

    def open(self) -> list[Path]:
        """Make the folder or take it over; return what lies there. Half of anything is deleted.

        Raises:
            StagingLocked: if another process has it.
            Unavailable: if it cannot be used.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                names = sorted(os.listdir(self.path))
            except BaseException:
                os.close(lock)
                raise
        except BlockingIOError as error:
            raise StagingLocked(f"another process uses {self.path}") from error
        except OSError as error:
            raise unwritable(error) from error
        self._lock = lock
        for name in names:
            if name.startswith(_INCOMING):
                logger.info("%s: half of an adapter is deleted", self.path / name)
                shutil.rmtree(self.path / name, ignore_errors=True)
        return [self.path / name for name in names if _STAGED.fullmatch(name)]

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def incoming(self, max_bytes: int) -> Incoming:
        """Begin to take in an adapter.

        Raises:
            Unavailable: if the disk refuses.
        """
        try:
            return Incoming(self.path / f"{_INCOMING}{next(self._numbers)}", max_bytes, self.room)
        except OSError as error:
            raise unwritable(error) from error

    def place_of(self, incoming: Incoming) -> Path:
        """Return where an adapter that is sealed belongs."""
        assert incoming.digest, "it must be sealed"
        return self.path / incoming.digest

    def place(self, incoming: Incoming) -> None:
        """Move an adapter to its place, unless the same bytes are there already.

        Raises:
            Unavailable: if the disk refuses.
        """
        place = self.place_of(incoming)
        try:
            if place.exists():
                incoming.discard()
                return
            os.rename(incoming.folder, place)
            _sync_folder(self.path)
        except OSError as error:
            raise unwritable(error) from error

    def remove(self, place: Path) -> None:
        """Delete what nobody needs; what cannot be deleted goes at the next start."""
        assert place.parent == self.path and _STAGED.fullmatch(place.name), place
        gone = self.path / f"{_INCOMING}{next(self._numbers)}"
        try:
            os.rename(place, gone)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s cannot be deleted: %s", place, error)
            return
        shutil.rmtree(gone, ignore_errors=True)


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Refuse weights that are too large.

    Raises:
        InvalidAdapter: with the limit.
    """
    if num_bytes > max_bytes:
        raise InvalidAdapter(f"{WEIGHTS} takes over {max_bytes} bytes (max_upload)")


def no_staging() -> InvalidRequest:
    """Return what to tell where there is no folder."""
    return InvalidRequest(
        "this adapter pool has no folder for adapters without a directory (adapter_staging)"
    )


def unwritable(error: OSError) -> Unavailable:
    """Return what to tell when the disk does not take an adapter."""
    return Unavailable(
        f"the staging folder cannot be written: {error.strerror or error}", retry_after=5
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
