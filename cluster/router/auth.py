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


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that is known; the base model is open to everyone."""

    tenant: str
    adapters: frozenset[str] | None  # names it may use; None: all
    admin: bool

    def may_use(self, adapter: str) -> bool:
        """Return whether requests may name this adapter."""
        return self.adapters is None or adapter in self.adapters

    def require_adapter(self, adapter: str) -> None:
        """Raise Forbidden unless requests may name this adapter."""
        if not self.may_use(adapter):
            raise Forbidden(f"this key may not use the model {adapter[:256]!r}", "model")

    def require_admin(self) -> None:
        """Raise Forbidden unless the caller may change what is served."""
        if not self.admin:
            raise Forbidden("this call needs a key with admin right")


ANYONE = Principal(tenant="default", adapters=None, admin=True)


class KeyEntry(BaseModel):
    """One key in the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    key: Annotated[str | None, Field(min_length=8)] = None
    key_sha256: Annotated[str | None, Field(pattern=r"^[0-9a-fA-F]{64}$")] = None
    tenant: Annotated[str, Field(min_length=1)]
    adapters: list[str] | Literal["*"] = Field(default_factory=list)
    admin: bool = False


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
            adapters = None if entry.adapters == "*" else frozenset(entry.adapters)
            self._principals.append((digest, Principal(entry.tenant, adapters, entry.admin)))

    @classmethod
    def load(cls, path: Path) -> "KeyRing":
        """Read a YAML list of {key or key_sha256, tenant, adapters: [names] or "*", admin}.

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
