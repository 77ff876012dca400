"""Reads files of a directory that strangers may have filled: regular ones, of bounded size.

Knows nothing of what is in them.
"""

import os
import stat
from pathlib import Path

from cluster.errors import InvalidAdapter


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for a writer, as a pipe would."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file; links are followed (a hub cache is made of them).

    Raises:
        InvalidAdapter: if it is missing, no regular file, too large or cannot be read.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidAdapter(f"{path.name} is not a regular file")
            if status.st_size > max_bytes:
                raise InvalidAdapter(
                    f"{path.name} takes {status.st_size} bytes, over the limit of {max_bytes}"
                )
            return file.read(max_bytes)
    except FileNotFoundError as error:
        raise InvalidAdapter(f"{path.name} is missing") from error
    except OSError as error:
        raise InvalidAdapter(f"{path.name} cannot be read: {error.strerror}") from error
