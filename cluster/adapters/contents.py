"""Content by digest: which versions hold it, whether it is pinned, and when nobody wants it.

Content that no version points at is retired: it stays readable for running requests until it is
forgotten. Knows versions only as holders; which of them a request gets is not decided here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cluster.adapters.adapter import Adapter
from cluster.adapters.host_tier import HostTier
from cluster.adapters.record import Outline, Source, Tier
from cluster.adapters.strict_json import shown
from cluster.adapters.versions import History, Version
from cluster.errors import InvalidRequest, NotFound

Holder = tuple[str, int]  # name and version


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that has been read whole."""

    adapter: Adapter
    outline: Outline  # of the same bytes
    held_bytes: int  # of memory that lives as long as the adapter


@dataclass(slots=True)
class _Content:
    outline: Outline  # as last read
    held_bytes: int
    holders: dict[Holder, Source] = field(default_factory=dict)  # the latest last


class Contents:
    """All content that is known, and the host tier that keeps some of it in memory."""

    def __init__(self, host_bytes: int, max_pinned: int) -> None:
        self._contents: dict[str, _Content] = {}
        self._digest_by_path: dict[str, str] = {}  # what was last read there
        self._pins: Counter[str] = Counter()  # names that pin it, by digest
        self._max_pinned = max_pinned
        self._retired: dict[str, int] = {}  # number of the retirement by digest
        self._num_retirements = 0
        self._host = HostTier(host_bytes)

    def change(
        self,
        name: str,
        before: History | None,
        after: History | None,
        loaded: Mapping[str, Loaded],
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
        for digest, one in loaded.items():
            self._bring(digest, one)

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
        sources = [*reversed(content.holders.values()), content.outline.source]
        sources.sort(key=lambda source: self._digest_by_path.get(source.path) != digest)
        return tuple(dict.fromkeys(sources))

    def restore(self, loaded: Loaded) -> None:
        """Bring content back from disk, unless it was forgotten meanwhile."""
        digest = loaded.adapter.digest
        if digest in self._contents:
            self._know(digest, loaded)
            self._bring(digest, loaded)

    def take(self, digest: str) -> Adapter:
        """Return content that is in host memory, as the one used last.

        Raises:
            NotFound: if the content is not known (any more).
        """
        sources = self.missing(digest)
        adapter = self._host.use(digest)
        assert adapter is not None, f"{digest} must be read from {sources} and restored first"
        return adapter

    def outline(self, digest: str) -> Outline:
        """Return what is known of content."""
        return self._contents[digest].outline

    def tier(self, digest: str, source: Source) -> Tier:
        """Return where the content of a version would be taken from."""
        if digest in self._host:
            return "host"
        return "disk" if self._digest_by_path.get(source.path) == digest else "gone"

    def pinned(self) -> tuple[str, ...]:
        """Return the digests that are pinned, sorted."""
        return tuple(sorted(+self._pins))

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
        del self._contents[digest], self._retired[digest]
        for path in [path for path, found in self._digest_by_path.items() if found == digest]:
            del self._digest_by_path[path]
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
        counts = Counter(digest for digests in pins for digest in digests)
        assert +self._pins == counts, f"pins: {+self._pins}, not {counts}"
        assert self._host.pinned() == counts.keys(), "memory keeps other adapters than are pinned"
        pinned_bytes = sum(self._contents[digest].held_bytes for digest in counts)
        assert pinned_bytes <= self._host.budget, "more is pinned than fits"
        assert len(counts) <= self._max_pinned, "more is pinned than slots allow"

    def _know(self, digest: str, loaded: Loaded) -> None:
        content = self._contents.get(digest)
        if content is None:
            self._contents[digest] = _Content(loaded.outline, loaded.held_bytes)
        elif digest not in self._host:
            content.outline, content.held_bytes = loaded.outline, loaded.held_bytes
        self._digest_by_path[loaded.outline.source.path] = digest

    def _bring(self, digest: str, loaded: Loaded) -> None:
        """Count as used what is in memory already; the bytes that were just read can go."""
        if self._host.use(digest) is None:
            is_pinned = self._pins[digest] > 0
            self._host.add(loaded.adapter, loaded.held_bytes, is_pinned=is_pinned)

    def _hold(self, name: str, version: Version) -> None:
        if version.digest is None:
            return
        content = self._contents[version.digest]
        if content.holders.get((name, version.number)) != version.outline.source:
            content.holders.pop((name, version.number), None)
            content.holders[name, version.number] = version.outline.source
        self._retired.pop(version.digest, None)

    def _release(self, name: str, version: Version, after: History | None) -> None:
        kept = after.get(version.number) if after is not None else None
        if version.digest is None or (kept is not None and kept.digest == version.digest):
            return
        content = self._contents[version.digest]
        del content.holders[name, version.number]
        if not content.holders:
            self._num_retirements += 1
            self._retired[version.digest] = self._num_retirements

    def _check_pins(
        self,
        name: str,
        old: frozenset[str],
        new: frozenset[str],
        loaded: Mapping[str, Loaded],
    ) -> None:
        """Refuse to pin more than host memory or device slots can hold."""
        added = {digest for digest in new if not self._pins[digest] - (digest in old)}
        if not added - old:
            return
        others = {d for d, count in self._pins.items() if count > (d in old)}
        num_bytes = sum(self._bytes(digest, loaded) for digest in added)
        pinned_bytes = sum(self._contents[digest].held_bytes for digest in others)
        if pinned_bytes + num_bytes > self._host.budget:
            raise InvalidRequest(
                f"{shown(name)} takes {num_bytes} bytes and cannot be pinned: "
                f"{pinned_bytes} of {self._host.budget} bytes of host memory are pinned already",
                "pinned",
            )
        if len(others) + len(added) > self._max_pinned:
            raise InvalidRequest(
                f"{shown(name)} cannot be pinned: {len(others)} adapters are pinned already, and "
                f"{self._max_pinned} may be, so that one device slot stays free for the others",
                "pinned",
            )

    def _bytes(self, digest: str, loaded: Mapping[str, Loaded]) -> int:
        if digest in self._host or digest not in loaded:
            return self._contents[digest].held_bytes
        return loaded[digest].held_bytes

    def _move_pins(self, old: frozenset[str], new: frozenset[str]) -> None:
        for digest in sorted(new - old):
            self._pins[digest] += 1
            self._host.pin(digest)
        for digest in sorted(old - new):
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]
                self._host.unpin(digest)
