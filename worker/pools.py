"""The pools of pages that a rank has: what they are called, and how many pages are in them.

Free of torch and of messages: the control plane imports it, and who measures a GPU without either.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# Layers of a kind share pages: those that attend to all positions, and those with a sliding window.
# Recurrent and convolution layers have a state for each sequence, in a page.
PoolName = Literal["full", "window", "state"]

# What K and V are in their pages: of the type of activations, or in int8.
KVCacheDtype = Literal["auto", "int8"]


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of each pool of a rank, on one tier.

    Where no layers are `full_layers`, `full` take no memory.
    """

    full: int
    window: int = 0
    state: int = 0

    def by_pool(self) -> dict[PoolName, int]:
        """Return them by the name of their pool."""
        return {"full": self.full, "window": self.window, "state": self.state}


NO_PAGES = PageCounts(0)


def fewest(counts: Iterable[PageCounts]) -> PageCounts:
    """Return of each pool the fewest pages that one has; there must be one."""
    every = tuple(counts)
    return PageCounts(
        full=min(one.full for one in every),
        window=min(one.window for one in every),
        state=min(one.state for one in every),
    )
