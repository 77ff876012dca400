"""What each tenant has used on each day, out of what all routers have counted since they began.

A router tells its counts as a whole, again and again; the book adds what is new in them. It keeps
what it has seen of each router beside the sums, and both are saved together, so that nothing counts
twice or is lost when its process ends. Knows no file and no clock: the day comes with each report.
"""

from collections.abc import Mapping

import msgspec

from cluster.tenancy.usage import NO_USAGE, Usage


class SavedUsage(msgspec.Struct, frozen=True):
    """The book as it is saved."""

    day: str = ""  # that is not over: 2026-11-24
    offset: int = 0  # bytes of the file that earlier days take
    totals: dict[str, Usage] = {}  # of the day, by tenant
    seen: dict[str, tuple[str, dict[str, Usage]]] = {}  # by router: day of its last news, counts


class UsageBook:
    """The sums of one day.

    `is_baseline`: what a router had counted when it is first heard of has been booked already,
    unless it has just begun.
    """

    def __init__(self, saved: SavedUsage | None = None, *, is_baseline: bool = False) -> None:
        saved = SavedUsage() if saved is None else saved
        self.day = saved.day
        self.has_news = False
        self._totals = dict(saved.totals)
        self._seen = dict(saved.seen)
        self._is_baseline = is_baseline

    def take_in(
        self, router: str, usage: Mapping[str, Usage], day: str, *, has_begun_now: bool = False
    ) -> None:
        """Add what a router has counted since its last report; what is older adds nothing.

        Raises:
            ValueError: if the day is not the book's: `turn_to` comes first.
        """
        if day != self.day:
            raise ValueError(f"the book is of {self.day}, not of {day}")
        is_booked = self._is_baseline and router not in self._seen and not has_begun_now
        seen = self._seen.get(router, ("", {}))[1]
        if usage == seen and not is_booked:
            return
        for tenant, counts in usage.items():
            added = counts.beyond(seen.get(tenant, NO_USAGE))
            if added != NO_USAGE and not is_booked:
                self._totals[tenant] = self._totals.get(tenant, NO_USAGE).plus(added)
        merged = {t: counts.at_least(seen.get(t, NO_USAGE)) for t, counts in usage.items()}
        self._seen[router] = (day, {**seen, **merged})
        self.has_news = True

    def turn_to(self, day: str) -> None:
        """Begin a day, and forget routers that were silent for all of the one before."""
        self._seen = {
            router: (last, counts)
            for router, (last, counts) in self._seen.items()
            if last >= self.day
        }
        self.day, self._totals, self.has_news = day, {}, True

    def lines(self) -> bytes:
        """Return the day as lines of JSON, one for each tenant, in the order of their names."""
        return b"".join(
            msgspec.json.encode({"date": self.day, "tenant": tenant, **_told(usage)}) + b"\n"
            for tenant, usage in sorted(self._totals.items())
        )

    def saved(self, offset: int) -> SavedUsage:
        """Return the book to be saved; the lines of its day begin at an offset of the file."""
        return SavedUsage(self.day, offset, dict(self._totals), dict(self._seen))


def _told(usage: Usage) -> dict[str, float]:
    return usage._replace(adapter_seconds=round(usage.adapter_seconds, 3))._asdict()
