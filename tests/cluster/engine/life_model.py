"""What adapters a small cluster must have after any calls: the documented rules in plain form.

Owns the directories on disk, with everything that can be wrong with one, and a plain model of the
catalogue: names, versions, shares, pins.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster.adapters.adapter import Adapter
from cluster.adapters.records import AdapterRecord
from cluster.adapters.sharding import cut_all
from cluster.errors import Conflict, InvalidAdapter, InvalidRequest, NotFound, TopworkError
from tests.cluster.adapters.tiny import tiny_adapter
from tests.cluster.engine.life_ranks import TP

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NUM_CONTENTS = 30
KEPT_VERSIONS = 4
# What can be in a directory that is no adapter; "gone" and "file": there is no directory.
DAMAGES = (
    *("gone", "file", "empty", "nan", "truncated", "no config", "directory", "dangling", "pipe"),
    "pickle",
)

Verdict = tuple[type[TopworkError], str] | None  # an error and a part of its message


def _make() -> tuple[dict[int, dict[str, bytes]], dict[int, Adapter], bytes]:
    """Return the files of each content, what they hold, and weights with a NaN."""
    files, adapters = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for content in range(NUM_CONTENTS):
            lora_rank = 4 if content % 5 == 4 else 2
            tiny = tiny_adapter("q_proj", lora_rank=lora_rank, seed=content)
            folder = tiny.write(Path(scratch, str(content)))
            adapters[content] = tiny.read(folder)
            files[content] = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
        tiny = tiny_adapter("q_proj", lora_rank=2)
        next(iter(tiny.tensors.values()))[0, 0] = float("nan")
        return files, adapters, (tiny.write(Path(scratch, "nan")) / WEIGHTS).read_bytes()


FILES, ADAPTERS, NAN = _make()
DIGESTS = {content: adapter.digest for content, adapter in ADAPTERS.items()}
UNUSABLE = DIGESTS[2]  # one of the ranks cannot compute it
BY_DIGEST = {adapter.digest: adapter for adapter in ADAPTERS.values()}
SIZES = {
    digest: sum(shard.data.nbytes for shard in cut_all(adapter, TP))
    for digest, adapter in BY_DIGEST.items()
}
SIZE = SIZES[DIGESTS[0]]  # bytes of the shards of most


class Disk:
    """Directories of adapters, good and bad."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: dict[str, int | str] = {}  # content or damage by folder

    def path(self, folder: str) -> str:
        """Return where a folder is."""
        return str(self._root / folder)

    def held(self, folder: str) -> int | str:
        """Return the content, or the damage, in a folder."""
        return self._held.get(folder, "gone")

    def holds(self, path: str, digest: str) -> bool:
        """Whether a path holds content."""
        held = self.held(os.path.relpath(path, self._root))
        return isinstance(held, int) and DIGESTS[held] == digest

    def write(self, folder: str, held: int | str) -> None:
        """Give a folder content or damage, by files that are new."""
        path = self._root / folder
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        self._held[folder] = held
        if held == "file":
            path.write_bytes(FILES[0][WEIGHTS])
        elif held != "gone":
            path.mkdir()
            for name, data in FILES[held if isinstance(held, int) else 0].items():
                (path / name).write_bytes(data)
            if isinstance(held, str):
                _spoil(path, held)


def _spoil(path: Path, damage: str) -> None:
    weights, data = path / WEIGHTS, FILES[0][WEIGHTS]
    if damage == "no config":
        (path / CONFIG).unlink()
        return
    weights.unlink()
    if damage == "nan":
        weights.write_bytes(NAN)
    elif damage == "truncated":
        weights.write_bytes(data[: len(data) // 2])
    elif damage == "directory":
        weights.mkdir()
    elif damage == "dangling":
        weights.symlink_to(path / "nowhere")
    elif damage == "pipe":
        os.mkfifo(weights)
    elif damage == "pickle":
        (path / "adapter_model.bin").write_bytes(b"\x80\x04")
    else:
        assert damage == "empty"
        (path / CONFIG).unlink()


@dataclass
class Entry:
    """What a name must stand for."""

    digests: dict[int, str | None]  # by version, ascending; None: not read yet
    shares: dict[int, int]  # percent by version
    pinned: bool

    @property
    def active(self) -> set[str | None]:
        """The content that requests get."""
        return {self.digests[number] for number in self.shares}

    @property
    def current(self) -> int:
        """The version that most requests get; of equals, the newest."""
        return max(self.shares, key=lambda number: (self.shares[number], number))


class ExpectedCatalog:
    """All names; `budget` is in bytes, for what is pinned."""

    def __init__(self, max_pinned: int, budget: int) -> None:
        self.names: dict[str, Entry] = {}
        self._last_numbers: dict[str, int] = {}
        self._max_pinned = max_pinned
        self._budget = budget

    @property
    def known(self) -> set[str]:
        """All content that some name points at."""
        return {d for e in self.names.values() for d in e.digests.values() if d is not None}

    @property
    def pinned(self) -> tuple[str, ...]:
        """All content that is pinned, sorted."""
        return tuple(sorted(self._pinned_by(self.names)))

    def copy(self, record: AdapterRecord) -> None:
        """Take over what a name really stands for, where the rules leave it open."""
        digests = {version.version: version.digest for version in record.versions}
        shares = {version.version: version.share for version in record.versions if version.share}
        self.names[record.name] = Entry(digests, shares, record.pinned)
        self._last_numbers[record.name] = max(max(digests), self._last_numbers.get(record.name, 0))

    def is_as(self, record: AdapterRecord, *, is_older: bool = False) -> bool:
        """Whether a record says what is known here.

        `is_older`: what the record has not read yet may have been read since.
        """
        entry = self.names.get(record.name)
        if entry is None:
            return False
        digests = {version.version: version.digest for version in record.versions}
        if is_older:
            digests = {one: digests[one] or entry.digests.get(one) for one in digests}
        return (
            entry.digests == digests
            and entry.shares == {v.version: v.share for v in record.versions if v.share}
            and (entry.pinned, entry.current) == (record.pinned, record.version)
        )

    def verdict(self, name: str, held: int | str, in_place: bool, pinned: bool) -> Verdict:
        """Return why a load must be refused."""
        if name in self.names and not in_place:
            return InvalidRequest, "has already been loaded"
        if held in ("gone", "file"):
            return NotFound, "there is no such directory"
        if isinstance(held, str):
            return InvalidAdapter, ""
        if pinned and not self.can_pin(name, {DIGESTS[held]}):
            return InvalidRequest, "cannot be pinned"
        return None

    def can_pin(self, name: str, digests: set[str | None]) -> bool:
        """Whether a name may pin this content in place of what it pins now."""
        others = self._pinned_by({n: e for n, e in self.names.items() if n != name})
        wanted = others | {digest for digest in digests if digest is not None}
        if wanted <= self._pinned_by(self.names):
            return True
        num_bytes = sum(SIZES[digest] for digest in wanted)
        return len(wanted) <= self._max_pinned and num_bytes <= self._budget

    def load(self, name: str, digest: str, pinned: bool) -> None:
        """Publish content under a name."""
        entry = self.names.setdefault(name, Entry({}, {}, False))
        number = entry.current if entry.shares else 0
        if not number or entry.digests[number] != digest:
            number = self._last_numbers.get(name, 0) + 1
        self._last_numbers[name] = max(number, self._last_numbers.get(name, 0))
        entry.digests[number] = digest
        entry.shares, entry.pinned = {number: 100}, pinned
        for old in sorted(entry.digests.keys() - {number})[
            : max(0, len(entry.digests) - KEPT_VERSIONS)
        ]:
            del entry.digests[old]

    def target(self, name: str, number: int | None) -> int | type[TopworkError]:
        """Return the version that a rollback goes to, or why there is none."""
        if name not in self.names:
            return NotFound
        entry = self.names[name]
        if number is None:
            return max((one for one in entry.digests if one < entry.current), default=Conflict)
        return number if number in entry.digests else Conflict

    def share(self, name: str, shares: dict[int, int]) -> None:
        """Give shares of the requests to versions of a name."""
        self.names[name].shares = {number: share for number, share in shares.items() if share}

    def _pinned_by(self, names: dict[str, Entry]) -> set[str]:
        pinned = (entry.active for entry in names.values() if entry.pinned)
        return {digest for active in pinned for digest in active if digest is not None}
