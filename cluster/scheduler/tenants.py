"""Which tenants have sequences now, and which had some lately, with their weights.

Lately is counted in steps. Who asks one thing after the other is away for a moment between them;
what the others begin meanwhile decides how long its next prompt waits.
"""

from dataclasses import dataclass

LATELY = 512  # steps
MAX_LATELY = 16  # tenants: any of them means that somebody may come back


@dataclass(slots=True, eq=False)
class Live:
    """A tenant that has sequences."""

    weight: int  # of the request that came last
    num_sequences: int = 0


class Tenants:
    """Counts the sequences of each tenant."""

    def __init__(self) -> None:
        self.step = 0  # that is being planned
        self._live: dict[str, Live] = {}
        self._left: dict[str, tuple[int, int]] = {}  # step and weight, the oldest first

    def __len__(self) -> int:
        return len(self._live)

    def enter(self, tenant: str, weight: int) -> None:
        """Count in a sequence that arrives."""
        live = self._live.get(tenant)
        if live is None:
            live = self._live[tenant] = Live(weight)
            self._left.pop(tenant, None)
        live.weight = weight
        live.num_sequences += 1

    def leave(self, tenant: str) -> None:
        """Count out a sequence that has ended."""
        live = self._live[tenant]
        live.num_sequences -= 1
        if live.num_sequences == 0:
            del self._live[tenant]
            self._left[tenant] = (self.step, live.weight)
            if len(self._left) > MAX_LATELY:
                del self._left[next(iter(self._left))]

    def weight(self, tenant: str) -> int:
        """Return the weight of one that has sequences."""
        return self._live[tenant].weight

    def weights(self) -> dict[str, int]:
        """Return the weights of those that have sequences."""
        return {tenant: live.weight for tenant, live in self._live.items()}

    def contenders(self) -> dict[str, int]:
        """Return the weights of those that have sequences, or had some in the last steps."""
        left = self._left
        while left and next(iter(left.values()))[0] + LATELY < self.step:
            del left[next(iter(left))]
        return self.weights() | {tenant: weight for tenant, (_, weight) in left.items()}
