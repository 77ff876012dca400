"""Adapter directories: every sub-directory is an adapter by its name, without registration.

`scan` looks, and `DirectoryChanges` remembers what has been dealt with, so that only what is new,
touched or gone comes up.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cluster.adapters.peft.checks import CONFIG, WEIGHTS
from cluster.adapters.peft.files import stamp
from cluster.adapters.saved_state import SavedDirectory, directory_entry
from cluster.adapters.versions import NAME


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """A sub-directory with the two files of an adapter."""

    name: str
    path: str
    stamp: str
    touched: int = field(default=0, compare=False)  # nanoseconds since 1970


@dataclass(frozen=True, slots=True)
class Scan:
    """What one look found. Where a look failed nothing is known, least of all that it is gone."""

    found: dict[str, AdapterDirectory]  # by name; of two of one name, that of the first directory
    unseen: frozenset[str]  # directories, whole or below, that could not be looked at


def scan(directories: Iterable[str]) -> Scan:
    """Look at all sub-directories; blocks on the disk, so call it in a thread."""
    found: dict[str, AdapterDirectory] = {}
    unseen: set[str] = set()
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            unseen.add(directory)
            continue
        for name in names:
            if name not in found and _is_name(name):
                _look(directory, name, found, unseen)
    return Scan(found, frozenset(unseen))


def probe(directories: Iterable[str], name: str) -> AdapterDirectory | None:
    """Look for one name only."""
    found: dict[str, AdapterDirectory] = {}
    for directory in directories:
        if not found and _is_name(name):
            _look(directory, name, found, set())
    return found.get(name)


def _is_name(name: str) -> bool:
    return "/" not in name and NAME.fullmatch(name) is not None


def _look(directory: str, name: str, found: dict[str, AdapterDirectory], unseen: set[str]) -> None:
    path = Path(directory, name)
    try:
        statuses = (path / CONFIG).stat(), (path / WEIGHTS).stat()
        touched = max(status.st_ctime_ns for status in statuses)
        found[name] = AdapterDirectory(name, str(path), stamp(*statuses), touched)
    except (FileNotFoundError, NotADirectoryError):
        return  # no adapter, or one that is half written: it comes up when it is whole
    except OSError:
        unseen.add(str(path))


class DirectoryChanges:
    """Remembers which states of which directories have been dealt with."""

    def __init__(self) -> None:
        self._done: dict[str, AdapterDirectory] = {}
        self._fresh: set[str] = set()  # could be touched again without another stamp
        self._note: Callable[[str], None] = lambda entry: None

    def pending(self, seen: Scan) -> tuple[tuple[AdapterDirectory, ...], tuple[str, ...]]:
        """Return (what is new or touched, names that are gone), each ordered by name."""
        changed = tuple(
            found
            for name, found in sorted(seen.found.items())
            if name in self._fresh or not self.is_done(found)
        )
        gone = tuple(
            name
            for name, found in sorted(self._done.items())
            if name not in seen.found
            and not {found.path, os.path.dirname(found.path)} & seen.unseen
        )
        return changed, gone

    def is_done(self, found: AdapterDirectory) -> bool:
        """Return whether this state of a directory has been dealt with."""
        return self._done.get(found.name) == found

    def done(self, found: AdapterDirectory, *, is_fresh: bool = False) -> None:
        """Let this state of a directory come up no more, or once more if it is fresh.

        File systems count time in steps of milliseconds: what is touched twice in one step looks
        as if it was touched once.
        """
        if self._done.get(found.name) != found or is_fresh != (found.name in self._fresh):
            self._note(directory_entry(found.name))
        self._done[found.name] = found
        if is_fresh:
            self._fresh.add(found.name)
        else:
            self._fresh.discard(found.name)

    def dismiss(self, name: str) -> None:
        """Let a directory come up no more until it is touched."""
        if name in self._fresh:
            self._fresh.discard(name)
            self._note(directory_entry(name))

    def forget(self, name: str) -> None:
        """Forget a name: it is new if it comes back."""
        if self._done.pop(name, None) is not None:
            self._note(directory_entry(name))
        self._fresh.discard(name)

    def note_changes(self, note: Callable[[str], None]) -> None:
        """Have `note` called with each entry of a SavedState that changes from now on."""
        self._note = note

    def saved(self, name: str) -> SavedDirectory | None:
        """Return what is to be saved of a directory that has been dealt with, if it has."""
        found = self._done.get(name)
        if found is None:
            return None
        return SavedDirectory(found.path, found.stamp, name in self._fresh)

    def bring_back(self, name: str, saved: SavedDirectory) -> None:
        """Take in what was saved of a directory."""
        self.done(AdapterDirectory(name, saved.path, saved.stamp), is_fresh=saved.is_fresh)
