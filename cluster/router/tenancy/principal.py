"""A caller that is known: which adapters it may name, see and change, and its other rights.

Owns what a scope lets a caller do. Where the rights come from is `key_file`'s; an adapter that a
caller may not use or see is answered as one that does not exist, which is up to who asks here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from cluster.errors import Forbidden, InvalidRequest
from cluster.request import PRIORITY_MIN
from cluster.tenancy.limits import NO_LIMITS, Limits, least
from cluster.tenancy.owners import Caller, Owner

Scope = Literal[
    "adapters:read",  # sees adapters under its prefix without using them
    "adapters:load",  # loads, unloads and changes adapters under its prefix
    "drain",  # lets all routers refuse calls, or take them again, and resets prefix caches
    "metrics",  # reads /metrics, the reasons in /health and /ready, and the pages of the API
    "events",  # reads KV events, which hold prompts
]
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))


@dataclass(frozen=True, slots=True)
class NamePatterns:
    """Which adapters are meant: some by their names, others by how these begin."""

    names: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()  # "": all names

    @classmethod
    def of(cls, patterns: Iterable[str]) -> "NamePatterns":
        """Take names, and beginnings of names with a `*` behind them.

        Raises:
            ValueError: if a `*` is elsewhere.
        """
        names, prefixes = set(), []
        for pattern in patterns:
            begin = pattern.removesuffix("*")
            if "*" in begin:
                raise ValueError(f"{pattern[:256]!r}: a * may stand at the end only")
            if begin == pattern:
                names.add(pattern)
            else:
                prefixes.append(begin)
        return cls(frozenset(names), tuple(prefixes))

    def match(self, name: str) -> bool:
        """Return whether a name is meant."""
        return name in self.names or name.startswith(self.prefixes)


ALL_NAMES = NamePatterns(prefixes=("",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller that is known; the base model is open to everyone."""

    tenant: str  # "" if keys are off
    key_name: str = ""  # of its key, in the audit log; of a token, its subject
    issuer: str = ""  # of its token; "": it has a key
    adapters: NamePatterns = NamePatterns()  # that its requests may name
    scopes: frozenset[Scope] = frozenset()
    adapter_prefix: str = ""  # of the names that the scopes of adapters are for
    adapter_root: str | None = None  # what it loads lies in it; None: wherever the server may read
    min_priority: int = 0  # smaller goes first; it may go no smaller
    weight: int = 1  # its share beside other tenants
    cache_group: str = ""  # callers with the same one may share what is cached
    key_id: str = ""  # first digits of the SHA-256 of its key, or of who it is; "": keys are off
    limits: Limits = NO_LIMITS  # of the key
    tenant_limits: Limits = NO_LIMITS

    def may_use(self, adapter: str) -> bool:
        """Return whether requests may name this adapter."""
        return self.adapters.match(adapter)

    def may_see(self, adapter: str) -> bool:
        """Return whether this adapter exists as far as the caller may know."""
        return self.may_use(adapter) or (
            bool(self.scopes & {"adapters:read", "adapters:load"})
            and adapter.startswith(self.adapter_prefix)
        )

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

    def counted_limits(self) -> dict[str, Limits]:
        """Return the limits that the cluster counts, by whose they are; empty: there are none."""
        by_subject = {
            f"key:{self.key_id}": self.limits,
            f"tenant:{self.tenant}": self.tenant_limits,
        }
        return {subject: one for subject, one in by_subject.items() if one.are_counted}

    def check_prompt(self, num_tokens: int, param: str = "prompt") -> None:
        """Raise InvalidRequest for a prompt that is longer than it may be."""
        limit = least(self.limits.max_prompt_tokens, self.tenant_limits.max_prompt_tokens)
        if limit is not None and num_tokens > limit:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, and this key may send {limit}",
                param,
                "context_length_exceeded",
            )

    @property
    def caller(self) -> Caller | None:
        """Whose the adapters are that it loads, and how many; None: keys are off."""
        if not self.key_id:
            return None
        of_tenant, of_key = self.tenant_limits.of_holdings, self.limits.of_holdings
        return Caller(Owner(self.tenant, self.key_id), of_tenant, of_key)

    @property
    def max_output_tokens(self) -> int | None:
        """The longest answer that it may have; None: what the context leaves."""
        return least(self.limits.max_output_tokens, self.tenant_limits.max_output_tokens)

    def cache_salt(self, wanted: str | None) -> str:
        """Return the salt of a request that asks for one, or for none.

        The group is part of it, framed: no salt of one group can spell another one's.
        """
        frame = f"{len(self.cache_group)}:{self.cache_group}" if self.cache_group else ""
        return frame + (wanted or "")

    def require(self, scope: Scope) -> None:
        """Raise Forbidden unless the caller has a scope."""
        if scope not in self.scopes:
            raise Forbidden(f"this call needs a key with the scope {scope}, or admin right")

    def require_name(self, adapter: str) -> None:
        """Raise Forbidden unless the caller may load something under this name.

        Whether an adapter has the name changes nothing.
        """
        self.require("adapters:load")
        if not adapter.startswith(self.adapter_prefix):
            raise Forbidden(
                f"this key may change adapters only whose names begin with {self.adapter_prefix!r}",
                "lora_name",
            )


# Without keys, on a machine of one's own.
ANYONE = Principal(
    tenant="", adapters=ALL_NAMES, scopes=SCOPES, min_priority=PRIORITY_MIN, key_name="none"
)
# Without keys, where other machines can call: something else has decided who may ask, but not who
# may change what is served, or read what others have asked.
ANONYMOUS = Principal(
    tenant="",
    adapters=ALL_NAMES,
    scopes=frozenset({"adapters:read", "metrics"}),
    min_priority=PRIORITY_MIN,
    key_name="none",
)
