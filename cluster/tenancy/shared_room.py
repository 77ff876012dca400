"""Room that tenants share: nobody takes more than eight times its part of what it leaves free.

A tenant's part is its weight's of the weights of all who hold places. So one that is alone has
eight ninths of the room. Where several take all they can, a ninth stays free for whoever comes
next, and they hold the rest by their weights. While they hold more than that, because another one
has come, what comes free is not theirs. The last free place is taken only by one that holds none.

Dynamic thresholds (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet
Switches", 1998), whose factor is divided among the tenants by weight. Integers only: the same calls
give the same answers.
"""

NOBODY = ""  # the tenant of all calls where keys are off: it has all of the room
FACTOR = 8  # one in FACTOR + 1 places stays free


def most_of(tenant: str, size: int) -> int:
    """Return how many places of an empty room a tenant may take."""
    return size if tenant == NOBODY else max(1, size * FACTOR // (FACTOR + 1))


class SharedRoom:
    """Places of one room, counted by tenant."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_held = 0
        self._held: dict[str, int] = {}  # by tenant; none is 0
        self._weights: dict[str, int] = {}  # of those who hold some, as they took the latest
        self._total_weight = 0

    def held_by(self, tenant: str) -> int:
        """Return how many places a tenant holds."""
        return self._held.get(tenant, 0)

    def has_room(self, count: int) -> bool:
        """Tell whether so many places are free at all."""
        return self.num_held + count <= self.size

    def may_take(self, tenant: str, count: int, weight: int = 1) -> bool:
        """Tell whether a tenant of this weight may take so many places more."""
        if not self.has_room(count):
            return False
        held = self.held_by(tenant)
        if tenant == NOBODY or (held == 0 and count == 1):
            return True
        left = self.size - self.num_held - count
        total = self._total_weight - self._weights.get(tenant, 0) + weight
        return (held + count) * total <= FACTOR * weight * left

    def take(self, tenant: str, count: int, weight: int = 1) -> None:
        """Take places, also more than `may_take` allows: what goes on is not refused."""
        if count:
            self._held[tenant] = self.held_by(tenant) + count
            self.num_held += count
            self._total_weight += weight - self._weights.get(tenant, 0)
            self._weights[tenant] = weight

    def give_back(self, tenant: str, count: int) -> None:
        """Give places back."""
        left = self.held_by(tenant) - count
        assert left >= 0, f"{tenant!r} gives back more than it holds"
        self.num_held -= count
        if left:
            self._held[tenant] = left
        elif self._held.pop(tenant, 0):
            self._total_weight -= self._weights.pop(tenant)
