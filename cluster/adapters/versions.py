"""A name and its versions: which are kept, and which share of the requests each one gets.

Plain immutable values: every change makes a new History, or raises and changes nothing.
"""

import re
from dataclasses import dataclass, replace
from hashlib import sha256

from cluster.adapters.peft.strict_json import shown
from cluster.adapters.records import Outline
from cluster.errors import Conflict, InvalidRequest
from cluster.request import BASE
from cluster.tenancy.owners import Owner

KEPT_VERSIONS = 4
WHOLE = 100  # percent
# What hubs and fine-tuning tools make; no space or control character, no dot file, no "../".
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:@+/-]{0,126}[A-Za-z0-9])?")


def check_name_form(name: str, base_name: str) -> None:
    """Refuse what no adapter can be called where the base model is called `base_name`.

    Raises:
        InvalidRequest: if the name is malformed or the base model's.
    """
    if NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{shown(name)} cannot name an adapter: it takes 1 to 128 letters, digits and "
            "._:@+/- with a letter or digit at both ends",
            "lora_name",
        )
    if name in (base_name, BASE):
        raise InvalidRequest(f"{shown(name)} is the name of the base model", "lora_name")


@dataclass(frozen=True, slots=True)
class Version:
    """What a name stood for from some moment on."""

    number: int
    outline: Outline
    digest: str | None  # None until the tensors are read for the first time


@dataclass(frozen=True, slots=True)
class History:
    """The versions of one name that are kept."""

    name: str
    versions: tuple[Version, ...]  # ascending by number; at least one
    shares: dict[int, int]  # percent by version; positive, together WHOLE
    pinned: bool
    watched: bool
    owner: Owner | None = None  # whose call has loaded it last; None: no call has
    pinned_by: Owner | None = None  # of a pin

    @property
    def current(self) -> Version:
        """The version that most requests get; of equals, the newest."""
        return max(self.active, key=lambda version: (self.shares[version.number], version.number))

    @property
    def active(self) -> tuple[Version, ...]:
        """The versions that requests can get."""
        return tuple(version for version in self.versions if version.number in self.shares)

    @property
    def digests(self) -> frozenset[str]:
        """The digests of all kept versions, as far as they are known."""
        return frozenset(v.digest for v in self.versions if v.digest is not None)

    @property
    def pinned_digests(self) -> frozenset[str]:
        """What must stay in memory because of this name."""
        if not self.pinned:
            return frozenset()
        return frozenset(v.digest for v in self.active if v.digest is not None)

    def get(self, number: int) -> Version | None:
        """Return a kept version."""
        return next((version for version in self.versions if version.number == number), None)

    def pick(self, request_id: str) -> Version:
        """Return the version that a request gets: the same for the same id and shares, always."""
        active = self.active
        if len(active) == 1:
            return active[0]
        drawn = sha256(f"{len(self.name)}:{self.name}{request_id}".encode()).digest()
        point = int.from_bytes(drawn[:8], "big") * WHOLE >> 64
        for version in active:
            point -= self.shares[version.number]
            if point < 0:
                return version
        raise AssertionError("shares do not add up")

    def publish(
        self, number: int, outline: Outline, digest: str | None, *, pinned: bool, watched: bool
    ) -> "History":
        """Give all requests to new content, or to the current version if it is the same content.

        A version whose tensors were never read is dropped if its directory is what is published
        now: nobody can have its content any more.
        """
        current = self.current
        if digest is not None and current.digest == digest:
            number = current.number
        version = Version(number, outline, digest)
        path = outline.source.path
        others = tuple(
            other
            for other in self.versions
            if other.number != number
            and not (other.digest is None and other.outline.source.path == path)
        )
        versions = tuple(sorted((*others, version), key=lambda one: one.number))
        return replace(
            self, versions=versions, shares={number: WHOLE}, pinned=pinned, watched=watched
        )._trimmed()

    def complete(self, number: int, outline: Outline, digest: str, next_number: int) -> "History":
        """Learn the digest of a version; it is another version if its files were touched since."""
        version = self.get(number)
        assert version is not None and version.digest is None, f"{self.name} is complete"
        if version.outline.stamp != outline.stamp:
            number = next_number
        completed = Version(number, outline, digest)
        versions = tuple(one for one in self.versions if one is not version)
        shares = {(number if n == version.number else n): s for n, s in self.shares.items()}
        return replace(
            self,
            versions=tuple(sorted((*versions, completed), key=lambda one: one.number)),
            shares=shares,
        )

    def rollback_target(self, number: int | None) -> int:
        """Return the version to go back to; asked for none, the one before the current one.

        Raises:
            Conflict: if it is not kept.
        """
        kept = [version.number for version in self.versions]
        if number is None:
            earlier = [one for one in kept if one < self.current.number]
            if not earlier:
                raise Conflict(
                    f"{shown(self.name)} has no version before {self.current.number}; kept are "
                    f"{_numbers(kept)}",
                    "version",
                )
            return earlier[-1]
        if number not in kept:
            raise Conflict(
                f"{shown(self.name)} has no version {number}; kept are {_numbers(kept)}", "version"
            )
        return number

    def rollback(self, number: int) -> "History":
        """Give all requests to a kept version."""
        return replace(self, shares={number: WHOLE})

    def split(self, shares: dict[int, int]) -> "History":
        """Give shares of the requests to kept versions.

        Raises:
            InvalidRequest: if the shares are no percentages that sum to 100.
            Conflict: if one of the versions is not kept.
        """
        if any(not 0 <= share <= WHOLE for share in shares.values()):
            raise InvalidRequest("shares are whole percentages from 0 to 100", "split")
        if sum(shares.values()) != WHOLE:
            raise InvalidRequest(f"the shares sum to {sum(shares.values())}, not {WHOLE}", "split")
        for number in shares:
            self.rollback_target(number)
        return replace(self, shares={n: shares[n] for n in sorted(shares) if shares[n]})

    def _trimmed(self) -> "History":
        """Drop the oldest versions that get no requests, down to KEPT_VERSIONS."""
        versions = list(self.versions)
        idle = [version for version in versions if version.number not in self.shares]
        for version in idle[: max(0, len(versions) - KEPT_VERSIONS)]:
            versions.remove(version)
        return replace(self, versions=tuple(versions))


def first(
    name: str, number: int, outline: Outline, digest: str | None, *, pinned: bool, watched: bool
) -> History:
    """Return the history of a name that is new."""
    return History(name, (Version(number, outline, digest),), {number: WHOLE}, pinned, watched)


def _numbers(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
