"""API keys: who calls, and what the caller may do.

Owns the file of keys and the comparison. Keys are kept as their SHA-256 only, and appear in no
message. Knows nothing of adapters but their names.
"""

import hmac
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from cluster.errors import Forbidden, Unauthorized
from cluster.router.schemas import PRIORITY_MAX, PRIORITY_MIN

MAX_WEIGHT = 1000


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


class KeyEntry(BaseModel):
    """One key in the file: itself or its SHA-256, its tenant and what it may do."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    key: Annotated[str | None, Field(min_length=8)] = None
    key_sha256: Annotated[str | None, Field(pattern=r"^[0-9a-fA-F]{64}$")] = None
    tenant: Annotated[str, Field(min_length=1)]
    adapters: list[str] | Literal["*"] = Field(default_factory=list)
    admin: bool = False
    # Smaller goes first. A request that names no priority has 0, or this if it is more.
    min_priority: Annotated[int, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = 0
    # Of two tenants that want all they can get, one of weight 2 gets twice what one of 1 does.
    weight: Annotated[int, Field(ge=1, le=MAX_WEIGHT)] = 1


_ENTRIES = TypeAdapter(list[KeyEntry])


class KeyRing:
    """The keys that are known; a ring without entries lets nobody in."""

    def __init__(self, entries: list[KeyEntry]) -> None:
        self._principals: list[tuple[bytes, Principal]] = []
        for number, entry in enumerate(entries):
            if (entry.key is None) == (entry.key_sha256 is None):
                raise ValueError(f"key {number}: needs either key or key_sha256")
            digest = (
                bytes.fromhex(entry.key_sha256)
                if entry.key_sha256 is not None
                else sha256((entry.key or "").encode()).digest()
            )
            principal = Principal(
                tenant=entry.tenant,
                adapters=None if entry.adapters == "*" else frozenset(entry.adapters),
                admin=entry.admin,
                min_priority=entry.min_priority,
                weight=entry.weight,
            )
            self._principals.append((digest, principal))

    @classmethod
    def load(cls, path: Path) -> "KeyRing":
        """Read a YAML list of keys, each with the fields of KeyEntry.

        Raises:
            ValueError: if the file is not such a list; the message holds no key.
        """
        try:
            document = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            place = getattr(error, "problem_mark", None)
            line = f" at line {place.line + 1}" if place is not None else ""
            raise ValueError(f"{path} is not YAML{line}") from None
        try:
            return cls(_ENTRIES.validate_python(document))
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{path}: {place}: {first['msg']}") from None

    def identify(self, authorization: str | None) -> Principal:
        """Return whose key an Authorization header carries.

        Raises:
            Unauthorized: if there is none, or nobody's.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
        presented = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: Principal | None = None
        for digest, principal in self._principals:  # all of them, whichever matches
            if hmac.compare_digest(digest, presented):
                found = principal
        if found is None:
            raise Unauthorized("unknown API key", code="invalid_api_key")
        return found
