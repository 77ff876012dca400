"""Reads files of a directory that strangers may have filled: regular ones, of bounded size.

Reading is confined to roots. A path is resolved and checked before anything is opened, and the
opened file is asked for its own path before a byte is read: a link that is swapped between the two
is met by the second check, which looks at what is open and not at a name.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cluster.errors import InvalidAdapter

COPIED_AT_ONCE = 1 << 20  # bytes
OUTSIDE = (
    "{} lies outside of the directories that adapters may be read from (adapter_root, adapter_dir)"
)


def resolve_roots(directories: Iterable[str]) -> tuple[str, ...]:
    """Return directories as `is_inside` takes them."""
    return tuple(os.path.realpath(directory) for directory in directories)


def is_inside(path: str, roots: tuple[str, ...]) -> bool:
    """Return whether a path without links is a root or lies in one; without roots all are."""
    return not roots or any(os.path.commonpath((path, root)) == root for root in roots)


def narrowed(roots: tuple[str, ...], root: str | None) -> tuple[str, ...]:
    """Return what lies in one of `roots` and in a directory of a caller's own, if it has one.

    Raises:
        InvalidAdapter: if nothing does.
    """
    if root is None:
        return roots
    (own,) = resolve_roots((root,))
    if is_inside(own, roots):
        return (own,)
    inner = tuple(one for one in roots if is_inside(one, (own,)))
    if not inner:
        raise InvalidAdapter(OUTSIDE.format("everything in the adapter_root of this key"))
    return inner


def confine(path: str, roots: tuple[str, ...]) -> None:
    """Refuse a path that leads out of the roots, before it is looked at.

    Raises:
        InvalidAdapter: without a word on where it leads or whether there is anything.
    """
    if not is_inside(os.path.realpath(path), roots):
        raise InvalidAdapter(OUTSIDE.format(os.path.basename(path)))


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for a writer, as a pipe would."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def open_regular_file(
    path: Path, max_bytes: int, roots: tuple[str, ...] = ()
) -> Iterator[tuple[BinaryIO, os.stat_result]]:
    """Hold a file open; links are followed (a hub cache is made of them), but not out of `roots`.

    Raises:
        InvalidAdapter: if it is missing, no regular file, too large, outside, or unreadable.
    """
    try:
        confine(str(path), roots)
        with open(path, "rb", opener=_open_at_once) as file:
            if roots and not is_inside(os.readlink(f"/proc/self/fd/{file.fileno()}"), roots):
                raise InvalidAdapter(f"{path.name} was swapped for a link while it was opened")
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidAdapter(f"{path.name} is not a regular file")
            if status.st_size > max_bytes:
                raise InvalidAdapter(
                    f"{path.name} takes {status.st_size} bytes, over the limit of {max_bytes}"
                )
            yield file, status
    except FileNotFoundError as error:
        raise InvalidAdapter(f"{path.name} is missing") from error
    except OSError as error:
        raise InvalidAdapter(f"{path.name} cannot be read: {error.strerror}") from error


def copy_regular_file(
    path: Path, max_bytes: int, roots: tuple[str, ...], write: Callable[[bytes], None]
) -> None:
    """Hand a file to `write` in pieces; raises as `open_regular_file`."""
    with open_regular_file(path, max_bytes, roots) as (file, _):
        while piece := file.read(COPIED_AT_ONCE):
            write(piece)


def stamp(*statuses: os.stat_result) -> str:
    """Return a text that is equal as long as none of the files is touched or replaced.

    Devices do not count: a network volume gets another number each time it is mounted.
    """
    return " ".join(f"{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}" for s in statuses)
