"""What an entry of the operator's files may let a caller do, be it for a key or for tokens."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.request import PRIORITY_MAX, PRIORITY_MIN
from cluster.router.tenancy.principal import ALL_NAMES, SCOPES, NamePatterns, Principal, Scope
from cluster.tenancy.limits import NO_LIMITS, Limits

MAX_WEIGHT = 1000


class Rights(BaseModel):
    """The fields that keys and rules for tokens have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    # Names, and beginnings of names with a * behind them.
    adapters: list[str] | Literal["*"] = Field(default_factory=list)
    admin: bool = False  # all scopes, on all names
    scopes: list[Scope] = Field(default_factory=list)
    adapter_prefix: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    adapter_root: Annotated[str, Field(pattern="^/")] | None = None
    # Of two tenants of one group, one can learn what the other has asked.
    cache_group: Annotated[str, Field(min_length=1)] | None = None
    # Smaller goes first. A request that names no priority has 0, or this if it is more.
    min_priority: Annotated[int, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = 0
    # Of two tenants that want all they can get, one of weight 2 gets twice what one of 1 does.
    weight: Annotated[int, Field(ge=1, le=MAX_WEIGHT)] = 1
    limits: Limits = NO_LIMITS  # of this key, or of each holder of tokens
    # Of all keys of the tenant together; one of them is enough to say it.
    tenant_limits: Limits | None = None

    @property
    def loads_under(self) -> str | None:
        """The beginning of the names that it may give as one of several tenants, if it may."""
        return self.adapter_prefix if "adapters:load" in self.scopes else None

    def check_rights(self) -> None:
        """Raise ValueError if the fields contradict each other."""
        NamePatterns.of(self.adapters)
        if self.admin and (self.adapter_prefix or self.adapter_root):
            raise ValueError(
                "admin is a right to all names and paths: leave adapter_prefix and adapter_root "
                "out, or give scopes in its place"
            )
        if "adapters:load" in self.scopes and not (self.admin or self.adapter_prefix):
            raise ValueError("the scope adapters:load needs an adapter_prefix")
        if self.adapter_prefix and not {"adapters:load", "adapters:read"} & set(self.scopes):
            raise ValueError("adapter_prefix needs the scope adapters:load or adapters:read")
        if self.adapter_root and "adapters:load" not in self.scopes:
            raise ValueError("adapter_root needs the scope adapters:load")

    def principal_of(
        self, tenant: str, name: str, key_id: str, tenant_limits: Limits, issuer: str = ""
    ) -> Principal:
        """Return who calls with these rights.

        Args:
            tenant: whose caller it is.
            name: what the audit log calls the key, or the subject of a token.
            key_id: whose limits `limits` are.
            tenant_limits: of the tenant.
            issuer: of a token.
        """
        patterns = ALL_NAMES if self.adapters == "*" else NamePatterns.of(self.adapters)
        if self.loads_under is not None:  # what it has loaded it may use
            own = (*patterns.prefixes, self.loads_under)
            patterns = NamePatterns(patterns.names, own)
        return Principal(
            tenant=tenant,
            key_name=name,
            issuer=issuer,
            adapters=patterns,
            scopes=SCOPES if self.admin else frozenset(self.scopes),
            adapter_prefix=self.adapter_prefix or "",
            adapter_root=self.adapter_root,
            min_priority=self.min_priority,
            weight=self.weight,
            cache_group=self.cache_group or tenant,
            key_id=key_id,
            limits=self.limits,
            tenant_limits=tenant_limits,
        )


def tenant_limits_of(entries: Iterable[tuple[int, str, Limits | None]]) -> dict[str, Limits]:
    """Return the limits of tenants that have any, from (number of the entry, tenant, limits).

    Raises:
        ValueError: if two entries give one tenant different ones.
    """
    by_tenant: dict[str, Limits] = {}
    for number, tenant, limits in entries:
        if limits is None:
            continue
        if by_tenant.setdefault(tenant, limits) != limits:
            raise ValueError(
                f"key {number}: tenant_limits differ from those that {tenant!r} has already"
            )
    return by_tenant


def check_prefixes(prefixes: Iterable[tuple[int, str, str]]) -> None:
    """Check prefixes of names that tenants may give: (number of the entry, prefix, tenant).

    Raises:
        ValueError: if a tenant may give names that are another one's.
    """
    first: dict[tuple[str, str], int] = {}
    for number, prefix, tenant in prefixes:
        first.setdefault((prefix, tenant), number)
    # Of what begins with a text, all stands behind it in order, without anything between.
    covering: list[tuple[str, int, str]] = []
    for (prefix, tenant), number in sorted(first.items()):
        while covering and not prefix.startswith(covering[-1][0]):
            covering.pop()
        for wider, other, owner in covering:
            if owner != tenant:
                raise ValueError(
                    f"{other} and {number}: the adapter_prefix {wider!r} of tenant {owner!r} is "
                    f"the beginning of {prefix!r} of tenant {tenant!r}"
                )
        covering.append((prefix, number, tenant))
