"""Where a prefix can be resumed in layers that keep only the end of it: checkpoints.

A layer with a sliding window needs the last pages before a position and no others. So a radix tree
has the pages of such layers at checkpoints only: positions, each with the pages just before it.
Checkpoints of one path that are close share pages.
"""

from bisect import bisect_right
from operator import attrgetter
from typing import Protocol

by_position = attrgetter("at")


class Changing(Protocol):
    """A tree: a match in it is stale when one of its checkpoints comes or goes."""

    def changed(self) -> None: ...


class CheckpointPage:
    """A page of the pool: of one sequence that writes it, or read only."""

    __slots__ = ("checkpoints", "host_page", "num_holds", "num_host_checkpoints", "page")

    def __init__(self, page: int) -> None:
        self.page: int | None = page  # on the device; None: it is in host memory only
        self.host_page: int | None = None
        self.num_holds = 1  # running sequences that have it in their page tables
        self.checkpoints: list[Checkpoint] = []  # that have it on the device
        self.num_host_checkpoints = 0  # that have it in host memory


class Checkpoint:
    """The pages before position `at` of a run, all on the tier that `is_on_host` tells.

    A position is a count of pages.
    """

    __slots__ = ("at", "is_on_host", "last_use", "num_held", "number", "of_run", "pages", "tree")

    def __init__(
        self,
        tree: Changing,
        of_run: "list[Checkpoint]",
        at: int,
        pages: list[CheckpointPage],
        number: int,
        step: int,
    ) -> None:
        self.tree = tree
        self.of_run = of_run  # all checkpoints of the run, by position; this one among them
        self.at = at
        self.pages = pages
        self.number = number  # in order of creation
        self.last_use = step
        self.is_on_host = False
        self.num_held = len(pages)  # of its pages on the device, those that sequences hold

    @property
    def num_on_device(self) -> int:
        """Pages that are on the device, be it for other checkpoints."""
        return sum(page.page is not None for page in self.pages)

    @property
    def num_unheld(self) -> int:
        """Pages on the device that no sequence holds."""
        return sum(page.page is not None and not page.num_holds for page in self.pages)


def ids_of(pages: list[CheckpointPage]) -> tuple[int, ...]:
    """Return where pages are on the device."""
    ids = tuple(page.page for page in pages if page.page is not None)
    assert len(ids) == len(pages), "what a sequence holds is on the device"
    return ids


def deepest(of_run: list[Checkpoint], start: int, end: int) -> Checkpoint | None:
    """Return the last checkpoint of a run behind its page `start`, up to position `end`."""
    at = bisect_right(of_run, end, key=by_position) - 1
    return of_run[at] if at >= 0 and of_run[at].at > start else None
