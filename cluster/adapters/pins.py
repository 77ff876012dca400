"""Which content is pinned, by how many names, and whether more can be.

Pinned content keeps its host memory and a place on the device, and room for one more adapter must
stay beside it. A name is pinned in its `History`; this is what follows for content, and the host
cache and every engine are given it from here: an engine's loader keeps what it was given for the
time when its ranks restart, and its slot table holds what is really pinned on the device.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.adapters.peft.strict_json import shown
from cluster.adapters.records import Facts
from cluster.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the host tier and the device slots of one scheduler can hold; sizes in bytes."""

    host_bytes: int
    num_slots: int
    device_bytes: int | None = None  # of each rank; None: slots alone are the limit


class Pins:
    """Counts pins by digest."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._names: Counter[str] = Counter()  # names that pin it, by digest
        self.num_changes = 0  # of what is pinned

    def __contains__(self, digest: str) -> bool:
        return self._names[digest] > 0

    def digests(self) -> tuple[str, ...]:
        """Return what is pinned, sorted."""
        return tuple(sorted(+self._names))

    def check_move(
        self,
        name: str,
        old: frozenset[str],
        new: frozenset[str],
        facts: Callable[[str], Facts],
        largest: int,
    ) -> None:
        """Check that a name may pin `new` instead of `old`.

        `largest` is what the largest of all other adapters claims on the device, in bytes.

        Raises:
            InvalidRequest: with the numbers, if it is more than fits.
        """
        added = {digest for digest in new if not self._names[digest] - (digest in old)}
        if not added - old:
            return
        others = {digest for digest, count in self._names.items() if count > (digest in old)}
        limits = self._limits
        host, pinned_host = (sum(facts(d).host_bytes for d in some) for some in (added, others))
        if pinned_host + host > limits.host_bytes:
            raise InvalidRequest(
                f"{shown(name)} takes {host} bytes and cannot be pinned: {pinned_host} of "
                f"{limits.host_bytes} bytes of host memory are pinned already",
                "pinned",
            )
        if len(others) + len(added) > limits.num_slots - 1:
            raise InvalidRequest(
                f"{shown(name)} cannot be pinned: {len(others)} adapters are pinned already, and "
                f"{limits.num_slots - 1} may be, so that one device slot stays free for the others",
                "pinned",
            )
        device, pinned = (sum(facts(d).device_bytes for d in some) for some in (added, others))
        if limits.device_bytes is not None and pinned + device + largest > limits.device_bytes:
            raise InvalidRequest(
                f"{shown(name)} takes {device} bytes on each rank and cannot be pinned: {pinned} "
                f"of {limits.device_bytes} bytes are pinned already, and {largest} must stay free "
                "for the largest of the others",
                "pinned",
            )

    def move(self, old: frozenset[str], new: frozenset[str]) -> tuple[list[str], list[str]]:
        """Pin `new` instead of `old` for one name; return (what is pinned now, what is no more)."""
        begun = [digest for digest in sorted(new - old) if not self._names[digest]]
        for digest in new - old:
            self._names[digest] += 1
        for digest in old - new:
            self._names[digest] -= 1
        ended = [digest for digest in sorted(old - new) if not self._names[digest]]
        for digest in ended:
            del self._names[digest]
        self.num_changes += bool(begun or ended)
        return begun, ended

    def check(self, pins: Iterable[frozenset[str]], facts: Callable[[str], Facts]) -> None:
        """Assert that these pins of names, and no others, are counted, and that they fit."""
        counts = Counter(digest for digests in pins for digest in digests)
        assert +self._names == counts, f"pins: {+self._names}, not {counts}"
        assert sum(facts(d).host_bytes for d in counts) <= self._limits.host_bytes, "over host"
        assert len(counts) < max(1, self._limits.num_slots), "more is pinned than slots allow"
        device_bytes = self._limits.device_bytes
        if device_bytes is not None:
            assert sum(facts(d).device_bytes for d in counts) <= device_bytes, "over the device"
