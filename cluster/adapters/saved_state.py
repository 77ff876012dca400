"""What of the adapter pool outlives its process, as entries of a StateFile.

An entry's name is its kind and, behind a slash, what it is about.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from cluster.adapters.records import Facts, Outline
from cluster.adapters.state_file import StateError
from cluster.adapters.versions import WHOLE
from cluster.tenancy.owners import Owner

SERVER, DRAINED = "server", "drained"


def name_entry(name: str) -> str:
    """Return the entry of what a name stands for."""
    return f"name/{name}"


def content_entry(digest: str) -> str:
    """Return the entry of content that no name points at, as long as requests may run on it."""
    return f"content/{digest}"


def directory_entry(name: str) -> str:
    """Return the entry of a watched directory that has been dealt with."""
    return f"directory/{name}"


def configured_entry(name: str) -> str:
    """Return the entry of what the configuration said of a name when it was taken in."""
    return f"configured/{name}"


class Sizes(msgspec.Struct, frozen=True):
    """What reading an adapter has told, beyond its outline; in bytes."""

    host_bytes: int
    device_bytes: int
    stands_alone: bool
    layout: str  # that the sizes are of


class SavedVersion(msgspec.Struct, frozen=True):
    """One version; without a digest if its tensors were never read."""

    number: int
    outline: Outline
    digest: str | None = None
    sizes: Sizes | None = None


class SavedName(msgspec.Struct, frozen=True):
    """A name, of which no version is left if it was unloaded."""

    last_number: int
    versions: tuple[SavedVersion, ...] = ()
    shares: dict[int, int] = {}
    pinned: bool = False
    watched: bool = False
    owner: Owner | None = None
    pinned_by: Owner | None = None


class SavedContent(msgspec.Struct, frozen=True):
    """Content that no name points at."""

    outline: Outline
    sizes: Sizes


class SavedDirectory(msgspec.Struct, frozen=True):
    """A watched directory as it was when it was dealt with."""

    path: str
    stamp: str
    is_fresh: bool


@dataclass(slots=True)
class SavedState:
    """All entries."""

    names: dict[str, SavedName] = field(default_factory=dict)
    contents: dict[str, SavedContent] = field(default_factory=dict)  # by digest
    directories: dict[str, SavedDirectory] = field(default_factory=dict)  # by name
    configured: dict[str, str] = field(default_factory=dict)  # directories by name
    server: str | None = None  # that the last pool belonged to
    is_drained: bool = False


def sizes_of(facts: Facts) -> Sizes:
    """Return what is kept of facts beside their outline."""
    return Sizes(facts.host_bytes, facts.device_bytes, facts.stands_alone, facts.layout)


def facts_of(digest: str, outline: Outline, sizes: Sizes) -> Facts:
    """Return facts as they were."""
    return Facts(
        digest=digest,
        outline=outline,
        host_bytes=sizes.host_bytes,
        device_bytes=sizes.device_bytes,
        stands_alone=sizes.stands_alone,
        layout=sizes.layout,
    )


def encode(value: object) -> Any:
    """Return the value of an entry as a StateFile takes it."""
    return msgspec.to_builtins(value, str_keys=True)


def decode(entries: Mapping[str, Any]) -> SavedState:
    """Return what entries say.

    Raises:
        StateError: if they are of another version of topwork.
    """
    state = SavedState()
    for entry, value in entries.items():
        kind, _, key = entry.partition("/")
        try:
            match kind:
                case "name":
                    state.names[key] = _checked(_convert(value, SavedName))
                case "content":
                    state.contents[key] = _convert(value, SavedContent)
                case "directory":
                    state.directories[key] = _convert(value, SavedDirectory)
                case "configured":
                    state.configured[key] = _convert(value, str)
                case "server":
                    state.server = _convert(value, str)
                case "drained":
                    state.is_drained = _convert(value, bool)
                case _:
                    raise ValueError("no such kind")
        except ValueError as error:
            raise StateError(
                f"the adapter state has an entry {entry!r} that this version of topwork does not "
                f"understand ({error}): name another file"
            ) from error
    return state


T = TypeVar("T")


def _convert(value: object, kind: type[T]) -> T:
    return msgspec.convert(value, kind, str_keys=True)


def _checked(saved: SavedName) -> SavedName:
    """Return what could have been saved; raise ValueError for anything else."""
    numbers = [version.number for version in saved.versions]
    if numbers != sorted(set(numbers)) or max(numbers, default=0) > saved.last_number:
        raise ValueError("versions out of order")
    if numbers and (sum(saved.shares.values()) != WHOLE or not saved.shares.keys() <= set(numbers)):
        raise ValueError("shares that do not add up")
    if any((one.digest is None) != (one.sizes is None) for one in saved.versions):
        raise ValueError("a version without its sizes")
    return saved
