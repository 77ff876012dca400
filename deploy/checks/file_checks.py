"""Looks at the files and directories of a configuration that are read, or written, while serving.

Nothing is made, and nothing is written.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.adapters.saved_state import decode
from cluster.adapters.state_file import StateError, read_entries
from cluster.router.config import STANDARD_ERROR
from cluster.router.tenancy.key_file import read_keys
from cluster.scheduler.replay.event_log import MAGIC
from deploy.config import ServeConfig
from deploy.config_errors import Mistake, one_line

LOCK_PATIENCE = 5.0  # seconds


def look_at_files(config: ServeConfig) -> Iterator[Mistake]:
    """Yield what is wrong with each file or directory."""
    if config.api_key_file is not None:
        yield from _look_at_keys(config.api_key_file)
    for key in ("adapter_dir", "adapter_root"):
        for name in getattr(config, key):
            yield from _look_at_directory(key, Path(name))
    if config.record is not None:
        yield from _look_at_written("record", config.record, _record_fault)
    if config.adapter_state is not None:
        yield from _look_at_written("adapter_state", config.adapter_state, _state_fault)
    if config.usage_file is not None:
        yield from _look_at_written("usage_file", config.usage_file, _usage_fault)
    if config.request_log not in (None, STANDARD_ERROR):
        yield from _look_at_written("request_log", Path(config.request_log), _log_fault)
    if config.adapter_staging is not None:
        yield from _look_at_staging(config.adapter_staging.absolute())


def _look_at_staging(folder: Path) -> Iterator[Mistake]:
    """Say why the pool could not have a folder, or make it."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            yield Mistake(f"adapter_staging: {there} is not a directory")
        elif not os.access(there, os.R_OK | os.W_OK | os.X_OK):
            yield Mistake(f"adapter_staging: {there} cannot be written to by this user")
    except (OSError, ValueError) as error:
        yield Mistake(f"adapter_staging: {one_line(error)}")


def _look_at_keys(file: Path) -> Iterator[Mistake]:
    try:
        read_keys(file)
    except FileNotFoundError as error:
        yield Mistake(f"api_key_file: {error}", is_absent=True)
    except (OSError, ValueError) as error:
        yield Mistake(f"api_key_file: {one_line(error)}")


def _look_at_directory(key: str, directory: Path) -> Iterator[Mistake]:
    try:
        if not directory.is_dir():
            yield Mistake(f"{key}: there is no directory {directory}", is_absent=True)
        elif not os.access(directory, os.R_OK | os.X_OK):
            yield Mistake(f"{key}: {directory} cannot be read by this user")
    except (OSError, ValueError) as error:
        yield Mistake(f"{key}: {one_line(error)}")


def _look_at_written(
    key: str, path: Path, fault_of: Callable[[Path], str | None]
) -> Iterator[Mistake]:
    """Say why a server could not go on in a file, or make it, as who writes it would find."""
    file = path.absolute()
    try:
        if not file.parent.is_dir():
            yield Mistake(f"{key}: there is no directory {file.parent}", is_absent=True)
        elif not os.access(file.parent, os.W_OK | os.X_OK):
            yield Mistake(f"{key}: {file.parent} cannot be written to by this user")
        elif not file.exists():
            return
        elif not file.is_file():
            yield Mistake(f"{key}: {file} is not a regular file")
        elif not os.access(file, os.R_OK | os.W_OK):
            yield Mistake(f"{key}: {file} cannot be written by this user")
        elif fault := fault_of(file) or _lock_fault(file):
            yield Mistake(f"{key}: {fault}")
    except (OSError, ValueError) as error:
        yield Mistake(f"{key}: {one_line(error)}")


def _record_fault(file: Path) -> str | None:
    """Look at the first line; the events behind it may be a gigabyte."""
    with file.open("rb") as opened:
        is_log = MAGIC.startswith(opened.read(len(MAGIC)))
    return None if is_log else f"{file} holds something else than recorded events"


def _usage_fault(file: Path) -> str | None:
    return None if _may_be_json(file) else f"{file} holds something else than lines of usage"


def _log_fault(file: Path) -> str | None:
    return None if _may_be_json(file) else f"{file} holds something else than lines of calls"


def _may_be_json(file: Path) -> bool:
    """Look at the beginning alone, as of a log."""
    with file.open("rb") as opened:
        return opened.read(1) in (b"", b"{")


def _state_fault(file: Path) -> str | None:
    try:
        decode(read_entries(file))
    except StateError as error:
        return one_line(error)
    return None


def _lock_fault(file: Path) -> str | None:
    """Wait a little for a server before this one, which may be ending."""
    deadline = time.monotonic() + LOCK_PATIENCE
    with file.open("rb") as opened:
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return f"{file} is being written by another process"
            time.sleep(0.05)
