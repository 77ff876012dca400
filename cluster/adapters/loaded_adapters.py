"""Content by digest: which versions hold it, where it is, and when none does any more.

Content that no version points at is retired: it stays readable for running requests until it is
forgotten.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cluster.adapters.host_cache import HostCache, Shards
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.pins import Limits, Pins
from cluster.adapters.records import Facts, Source, Tier
from cluster.adapters.saved_state import content_entry, name_entry
from cluster.adapters.versions import History, Version
from cluster.errors import NotFound

Holder = tuple[str, int]  # name and version


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that has been read whole, checked and cut."""

    facts: Facts
    shards: Shards


@dataclass(slots=True)
class _Content:
    facts: Facts  # as last read
    holders: dict[Holder, Source] = field(default_factory=dict)  # the latest last


class Contents:
    """All content that is known, and the host cache that keeps some of it in memory."""

    def __init__(self, limits: Limits) -> None:
        self.layout = ""  # how adapters are cut
        self._contents: dict[str, _Content] = {}
        self._digest_by_path: dict[str, str] = {}  # what was last read there
        self._pins = Pins(limits)
        self._retired: dict[str, int] = {}  # number of the retirement by digest
        self._num_retirements = 0
        self._host = HostCache(limits.host_bytes)
        self._note: Callable[[str], None] = lambda entry: None
        self._on_release: Callable[[str], None] = lambda path: None

    @property
    def host_cache(self) -> HostCache:
        """What is in host memory; to look at."""
        return self._host

    @property
    def num_pin_changes(self) -> int:
        """How often `pinned` has changed."""
        return self._pins.num_changes

    def change(
        self,
        name: str,
        before: History | None,
        after: History | None,
        loaded: Mapping[str, LoadedAdapter],
    ) -> None:
        """Let a name's versions hold what they hold `after`; `loaded` is what was read for that.

        Raises:
            InvalidRequest: if more would be pinned than may be; nothing changes.
        """
        old_pins = before.pinned_digests if before is not None else frozenset()
        new_pins = after.pinned_digests if after is not None else frozenset()
        self._check_pins(name, old_pins, new_pins, loaded)
        for digest, one in loaded.items():
            self._know(digest, one)
        for version in after.versions if after is not None else ():
            self._hold(name, version)
        for version in before.versions if before is not None else ():
            self._release(name, version, after)
        self._move_pins(old_pins, new_pins)
        for one in loaded.values():
            self._bring(one)

    def missing(self, digest: str) -> tuple[Source, ...]:
        """Return where content that is not in memory can be read, the best place first.

        Raises:
            NotFound: if the content is not known (any more).
        """
        content = self._contents.get(digest)
        if content is None:
            raise NotFound(f"The lora adapter of digest {shown(digest)} has been unloaded.")
        if digest in self._host:
            return ()
        sources = [*reversed(content.holders.values()), content.facts.outline.source]
        sources.sort(key=lambda source: self._digest_by_path.get(source.path) != digest)
        return tuple(dict.fromkeys(sources))

    def restore(self, loaded: LoadedAdapter) -> None:
        """Bring content back from disk, unless it was forgotten meanwhile."""
        digest = loaded.facts.digest
        if digest in self._contents:
            self._know(digest, loaded)
            self._bring(loaded)

    def take(self, digest: str) -> Shards:
        """Return content that is in host memory, as the one used last.

        Raises:
            NotFound: if the content is not known (any more).
        """
        sources = self.missing(digest)
        shards = self._host.use(digest)
        assert shards is not None, f"{digest} must be read from {sources} and restored first"
        return shards

    def facts(self, digest: str) -> Facts:
        """Return what is known of content."""
        return self._contents[digest].facts

    def tier(self, digest: str, source: Source) -> Tier:
        """Return where the content of a version would be taken from."""
        if digest in self._host:
            return "host"
        return "disk" if self._digest_by_path.get(source.path) == digest else "gone"

    def is_outdated(self, digest: str) -> bool:
        """Tell whether content must be read before its sizes can be relied on."""
        return self._contents[digest].facts.layout != self.layout and digest not in self._host

    def bring_back(self, facts: Facts) -> None:
        """Know content that a process before has read; it is retired until a version holds it."""
        if facts.digest not in self._contents:
            self._contents[facts.digest] = _Content(facts)
            self._retire(facts.digest)
        self._digest_by_path[facts.outline.source.path] = facts.digest

    def note_changes(self, note: Callable[[str], None]) -> None:
        """Have `note` called with each entry of a SavedState that changes from now on."""
        self._note = note

    def note_released(self, on_release: Callable[[str], None]) -> None:
        """Have `on_release` called with each directory that something reads no more."""
        self._on_release = on_release

    def uses(self, path: str) -> bool:
        """Tell whether any content would be read from a directory."""
        digest = self._digest_by_path.get(path)
        if digest is None:
            return False
        content = self._contents[digest]
        sources = (content.facts.outline.source, *content.holders.values())
        return any(source.path == path for source in sources)

    def pinned(self) -> tuple[Facts, ...]:
        """Return what is pinned, ordered by digest."""
        return tuple(self.facts(digest) for digest in self._pins.digests())

    def retired(self) -> dict[str, int]:
        """Return the content that no version points at, with the number of its retirement."""
        return dict(self._retired)

    def retirement(self, digest: str) -> int | None:
        """Return the number of a retirement that no version has ended; each has its own."""
        return self._retired.get(digest)

    def forget(self, digest: str) -> int:
        """Free retired content; return the bytes of host memory."""
        if digest not in self._contents:
            return 0
        assert digest in self._retired, f"{digest} is forgotten under its holders"
        self._on_release(self.facts(digest).outline.source.path)
        del self._contents[digest], self._retired[digest]
        for path in [path for path, found in self._digest_by_path.items() if found == digest]:
            del self._digest_by_path[path]
        self._note(content_entry(digest))
        return self._host.discard(digest)

    def check(self, versions: Mapping[Holder, Version], pins: Iterable[frozenset[str]]) -> None:
        """Assert that these versions and pins, and no others, are what holds the content here."""
        self._host.check()
        held = {
            (holder, digest, source)
            for digest, content in self._contents.items()
            for holder, source in content.holders.items()
        }
        wanted = {
            (holder, version.digest, version.outline.source)
            for holder, version in versions.items()
            if version.digest is not None
        }
        assert held == wanted, f"content is held wrongly: {held ^ wanted}"
        for digest, content in self._contents.items():
            assert bool(content.holders) != (digest in self._retired), f"{digest} is in between"
        assert self._retired.keys() <= self._contents.keys(), "something unknown is retired"
        assert self._host.digests() <= self._contents.keys(), "memory holds what nobody can reach"
        assert set(self._digest_by_path.values()) <= self._contents.keys(), "a path leads nowhere"
        self._pins.check(pins, self.facts)
        pinned = self._host.digests() & set(self._pins.digests())
        assert self._host.pinned() == pinned, "memory keeps other adapters than are pinned"

    def _know(self, digest: str, loaded: LoadedAdapter) -> None:
        content = self._contents.get(digest)
        if content is None:
            self._contents[digest] = _Content(loaded.facts)
        elif digest not in self._host:
            if content.facts.layout != loaded.facts.layout:
                for name, _ in content.holders:
                    self._note(name_entry(name))
            self._on_release(content.facts.outline.source.path)
            content.facts = loaded.facts
        self._digest_by_path[loaded.facts.outline.source.path] = digest

    def _bring(self, loaded: LoadedAdapter) -> None:
        """Count as used what is in memory already; the shards that were just cut can go."""
        facts = loaded.facts
        if self._host.use(facts.digest) is None:
            is_pinned = facts.digest in self._pins
            self._host.add(facts.digest, loaded.shards, facts.host_bytes, is_pinned=is_pinned)

    def _hold(self, name: str, version: Version) -> None:
        if version.digest is None:
            return
        content = self._contents[version.digest]
        if content.holders.get((name, version.number)) != version.outline.source:
            before = content.holders.pop((name, version.number), None)
            if before is not None:
                self._on_release(before.path)
            content.holders[name, version.number] = version.outline.source
        if self._retired.pop(version.digest, None) is not None:
            self._note(content_entry(version.digest))

    def _release(self, name: str, version: Version, after: History | None) -> None:
        kept = after.get(version.number) if after is not None else None
        if version.digest is None or (kept is not None and kept.digest == version.digest):
            return
        content = self._contents[version.digest]
        self._on_release(content.holders.pop((name, version.number)).path)
        if not content.holders:
            self._retire(version.digest)

    def _retire(self, digest: str) -> None:
        self._num_retirements += 1
        self._retired[digest] = self._num_retirements
        self._note(content_entry(digest))

    def _check_pins(
        self,
        name: str,
        old: frozenset[str],
        new: frozenset[str],
        loaded: Mapping[str, LoadedAdapter],
    ) -> None:
        """Refuse to pin more than host memory or device can hold."""

        def facts(digest: str) -> Facts:
            is_read = digest in loaded and digest not in self._host
            return loaded[digest].facts if is_read else self.facts(digest)

        if new - old:
            others = (self._contents.keys() | loaded.keys()) - new - set(self._pins.digests())
            largest = max((facts(digest).device_bytes for digest in others), default=0)
            self._pins.check_move(name, old, new, facts, largest)

    def _move_pins(self, old: frozenset[str], new: frozenset[str]) -> None:
        begun, ended = self._pins.move(old, new)
        for digest in begun:
            self._host.pin(digest)
        for digest in ended:
            self._host.unpin(digest)
