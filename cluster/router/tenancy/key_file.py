"""The file of API keys: what an entry may say, and what it makes of a caller.

Keys are kept as their SHA-256 only, and appear in no message.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator

from cluster.router.tenancy.principal import Principal
from cluster.router.tenancy.rights import Rights, check_prefixes, tenant_limits_of
from cluster.router.tenancy.yaml_list import parse_entries, read_file
from cluster.tenancy.limits import NO_LIMITS, Limits


def _moment(value: object) -> object:
    """Return a date and time with a zone, as YAML has made it or as a text."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        moment = None
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ValueError("must be a date and time with a zone, such as 2027-01-31T12:00:00Z")
    return moment


class KeyEntry(Rights):
    """One key in the file: itself or its SHA-256, its tenant and what it may do."""

    key: Annotated[str | None, Field(min_length=8)] = None
    key_sha256: Annotated[str | None, Field(pattern=r"^[0-9a-fA-F]{64}$")] = None
    # What the audit log calls it; without one, by its place in the file: "#0" is the first.
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tenant: Annotated[str, Field(min_length=1)]
    expires: Annotated[datetime, BeforeValidator(_moment)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "KeyEntry":
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError("needs either key or key_sha256")
        self.check_rights()
        return self

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the key."""
        if self.key_sha256 is not None:
            return bytes.fromhex(self.key_sha256)
        return sha256((self.key or "").encode()).digest()

    def principal(self, number: int, tenant_limits: Limits) -> Principal:
        """Return who calls with this key, the entry of this number."""
        name, key_id = self.name or f"#{number}", self.digest.hex()[:12]
        return self.principal_of(self.tenant, name, key_id, tenant_limits)


_ENTRIES = TypeAdapter(list[KeyEntry])


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key of the file as it is looked up."""

    digest: bytes  # SHA-256
    principal: Principal
    expires: float | None  # seconds since 1970


def read_keys(path: Path) -> tuple[KnownKey, ...]:
    """Return the keys of a file, a YAML list of entries with the fields of KeyEntry.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not such a list; the message holds no key.
    """
    return parse_keys(read_file(path), path)


def parse_keys(data: bytes, path: Path) -> tuple[KnownKey, ...]:
    """Return the keys that the bytes of a file hold; raises as `read_keys`."""
    entries = parse_entries(_ENTRIES, data, path)
    numbered = tuple(enumerate(entries))
    try:
        _check_that_keys_differ(entries)
        check_prefixes(
            (number, entry.loads_under, entry.tenant)
            for number, entry in numbered
            if entry.loads_under is not None
        )
        limits = tenant_limits_of((n, entry.tenant, entry.tenant_limits) for n, entry in numbered)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(
        KnownKey(
            entry.digest,
            entry.principal(number, limits.get(entry.tenant, NO_LIMITS)),
            None if entry.expires is None else entry.expires.timestamp(),
        )
        for number, entry in numbered
    )


def _check_that_keys_differ(entries: Iterable[KeyEntry]) -> None:
    by_digest: dict[bytes, dict[int, str]] = defaultdict(dict)
    for number, entry in enumerate(entries):
        by_digest[entry.digest][number] = entry.tenant
    for same in (same for same in by_digest.values() if len(same) > 1):
        tenants = ", ".join(map(repr, dict.fromkeys(same.values())))
        raise ValueError(f"{' and '.join(map(str, same))} are the same key, of tenant {tenants}")
