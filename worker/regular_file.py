"""Opens the files of a model directory, which strangers may have filled.

A pipe or a device is refused before it is read: opening the one waits for ever, reading the other
never ends.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_regular_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Hold a file open, and tell its size; links are followed, a hub cache is made of them.

    Raises:
        OSError: if it is missing or cannot be read.
        ValueError: if it is no regular file.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        yield file, status.st_size


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return what a file holds.

    Raises:
        OSError, ValueError: as `open_regular_file`, and if it is larger than `max_bytes`.
    """
    with open_regular_file(path) as (file, size):
        if size > max_bytes:
            raise ValueError(f"{path.name} takes {size} bytes, over the limit of {max_bytes}")
        return file.read(max_bytes)


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for a writer, as a pipe would."""
    return os.open(path, flags | os.O_NONBLOCK)
