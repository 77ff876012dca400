"""Who has loaded or pinned an adapter by a call, and how much of that is allowed."""

from collections.abc import Iterator

import msgspec


class HoldingLimits(msgspec.Struct, frozen=True):
    """What may be held at a time; None: as much as there is."""

    max_adapters: int | None = None  # names that calls have loaded
    max_adapter_bytes: int | None = None  # of host memory that all their versions take
    max_pinned: int | None = None  # names that calls have pinned

    @property
    def are_none(self) -> bool:
        """Whether there is nothing to look at."""
        return self == _NO_LIMITS


_NO_LIMITS = HoldingLimits()


class Owner(msgspec.Struct, frozen=True):
    """Whose call it was."""

    tenant: str
    key: str = ""  # id of the key, or of the subject of a token


class Caller(msgspec.Struct, frozen=True):
    """Who calls now, and what that one may hold."""

    owner: Owner
    tenant_limits: HoldingLimits = _NO_LIMITS
    key_limits: HoldingLimits = _NO_LIMITS


class HoldingAccount(msgspec.Struct, frozen=True):
    """What is counted together: all of a tenant, or all of one of its keys."""

    tenant: str
    key: str | None  # None: of all keys
    limits: HoldingLimits

    def __str__(self) -> str:
        return f"the tenant {self.tenant[:256]!r}" if self.key is None else "this key"

    def has(self, owner: Owner | None) -> bool:
        """Tell whether what someone has loaded or pinned counts here."""
        return (
            owner is not None
            and owner.tenant == self.tenant
            and (self.key is None or owner.key == self.key)
        )


def accounts_of(caller: Caller) -> Iterator[HoldingAccount]:
    """Yield what a call must fit in."""
    owner = caller.owner
    for key, limits in ((None, caller.tenant_limits), (owner.key, caller.key_limits)):
        if not limits.are_none:
            yield HoldingAccount(owner.tenant, key, limits)
