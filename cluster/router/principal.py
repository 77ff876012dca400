"""A caller that is known, and what it may do: its adapters, priorities and share."""

from dataclasses import dataclass

from cluster.errors import Forbidden
from cluster.request import PRIORITY_MIN


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that is known; the base model is open to everyone."""

    tenant: str  # "" if keys are off
    adapters: frozenset[str] | None  # names it may use; None: all
    admin: bool
    min_priority: int  # smaller goes first; it may go no smaller
    weight: int  # its share beside other tenants

    def may_use(self, adapter: str) -> bool:
        """Return whether requests may name this adapter."""
        return self.adapters is None or adapter in self.adapters

    def require_adapter(self, adapter: str, param: str = "model") -> None:
        """Raise Forbidden unless requests may name this adapter, which `param` does."""
        if not self.may_use(adapter):
            raise Forbidden(f"this key may not use the model {adapter[:256]!r}", param)

    def priority(self, wanted: int | None) -> int:
        """Return the priority of a request that asks for one, or for none.

        Raises:
            Forbidden: if it would go before what this key allows.
        """
        if wanted is None:
            return max(0, self.min_priority)
        if wanted < self.min_priority:
            raise Forbidden(
                f"priority: {wanted} is less than {self.min_priority}, the least of this key",
                "priority",
            )
        return wanted

    def require_admin(self) -> None:
        """Raise Forbidden unless the caller may change what is served."""
        if not self.admin:
            raise Forbidden("this call needs a key with admin right")


ANYONE = Principal(tenant="", adapters=None, admin=True, min_priority=PRIORITY_MIN, weight=1)
