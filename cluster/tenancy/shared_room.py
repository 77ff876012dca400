"""Room that tenants share: nobody holds more places than it leaves free.

One that fills what it can leaves half, the next one a quarter, and so on: with a room of 1,024,
nine that take all they can leave a place for the tenth. As places come free they go to those who
hold less. The rule needs no list of tenants and no shares: dynamic thresholds (Choudhury and Hahne,
"Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998) with a factor of 1.
"""

NOBODY = ""  # the tenant of all calls where keys are off: it has all of the room


def may_take(tenant: str, held: int, count: int, free: int) -> bool:
    """Tell whether a tenant that holds some places may take `count` of those that are free."""
    return count <= free and (tenant == NOBODY or held + count <= free - count)


def most_of(tenant: str, size: int) -> int:
    """Return how many places of an empty room a tenant may take."""
    return size if tenant == NOBODY else size // 2


class SharedRoom:
    """Places of one room, counted by tenant."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_held = 0
        self._held: dict[str, int] = {}  # by tenant; none is 0

    def held_by(self, tenant: str) -> int:
        """Return how many places a tenant holds."""
        return self._held.get(tenant, 0)

    def has_room(self, count: int) -> bool:
        """Tell whether so many places are free at all."""
        return self.num_held + count <= self.size

    def may_take(self, tenant: str, count: int) -> bool:
        """Tell whether a tenant may take so many places more."""
        return may_take(tenant, self.held_by(tenant), count, self.size - self.num_held)

    def take(self, tenant: str, count: int) -> None:
        """Take places, also more than `may_take` allows: what goes on is not refused."""
        if count:
            self._held[tenant] = self.held_by(tenant) + count
            self.num_held += count

    def give_back(self, tenant: str, count: int) -> None:
        """Give places back."""
        left = self.held_by(tenant) - count
        assert left >= 0, f"{tenant!r} gives back more than it holds"
        self.num_held -= count
        if left:
            self._held[tenant] = left
        else:
            self._held.pop(tenant, None)
