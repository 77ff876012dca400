"""The file of API keys: what an entry may say, and what it makes of a caller.

Keys are kept as their SHA-256 only, and appear in no message.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from cluster.request import PRIORITY_MAX, PRIORITY_MIN
from cluster.router.tenancy.principal import ALL_NAMES, SCOPES, NamePatterns, Principal, Scope
from cluster.tenancy.limits import NO_LIMITS, Limits

MAX_WEIGHT = 1000
MAX_FILE_BYTES = 64 << 20  # some hundred thousand keys; what is larger is no file of keys
MAX_DEPTH = 64
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast


def _moment(value: object) -> object:
    """Return a date and time with a zone, as YAML has made it or as a text."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        moment = None
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ValueError("must be a date and time with a zone, such as 2027-01-31T12:00:00Z")
    return moment


class KeyEntry(BaseModel):
    """One key in the file: itself or its SHA-256, its tenant and what it may do."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    key: Annotated[str | None, Field(min_length=8)] = None
    key_sha256: Annotated[str | None, Field(pattern=r"^[0-9a-fA-F]{64}$")] = None
    # What the audit log calls it; without one, by its place in the file: "#0" is the first.
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tenant: Annotated[str, Field(min_length=1)]
    expires: Annotated[datetime, BeforeValidator(_moment)] | None = None
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
    limits: Limits = NO_LIMITS  # of this key
    # Of all keys of the tenant together; one of them is enough to say it.
    tenant_limits: Limits | None = None

    @model_validator(mode="after")
    def _check(self) -> "KeyEntry":
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError("needs either key or key_sha256")
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
        return self

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the key."""
        if self.key_sha256 is not None:
            return bytes.fromhex(self.key_sha256)
        return sha256((self.key or "").encode()).digest()

    @property
    def loads_under(self) -> str | None:
        """The beginning of the names that it may give as one of several tenants, if it may."""
        return self.adapter_prefix if "adapters:load" in self.scopes else None

    def principal(self, number: int, tenant_limits: Limits) -> Principal:
        """Return who calls with this key, the entry of this number."""
        patterns = ALL_NAMES if self.adapters == "*" else NamePatterns.of(self.adapters)
        if self.loads_under is not None:  # what it has loaded it may use
            own = (*patterns.prefixes, self.loads_under)
            patterns = NamePatterns(patterns.names, own)
        return Principal(
            tenant=self.tenant,
            key_name=self.name or f"#{number}",
            adapters=patterns,
            scopes=SCOPES if self.admin else frozenset(self.scopes),
            adapter_prefix=self.adapter_prefix or "",
            adapter_root=self.adapter_root,
            min_priority=self.min_priority,
            weight=self.weight,
            cache_group=self.cache_group or self.tenant,
            key_id=self.digest.hex()[:12],
            limits=self.limits,
            tenant_limits=tenant_limits,
        )


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


def read_file(path: Path) -> bytes:
    """Return the bytes of a file of keys; raises as `read_keys`."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is over the limit of {MAX_FILE_BYTES} bytes")
    return data


def parse_keys(data: bytes, path: Path) -> tuple[KnownKey, ...]:
    """Return the keys that the bytes of a file hold; raises as `read_keys`."""
    document = _document(data, path)
    try:
        entries = _ENTRIES.validate_python(document)
        _check_that_keys_differ(entries)
        _check_that_prefixes_differ(entries)
        limits = _tenant_limits(entries)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {field}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(
        KnownKey(
            entry.digest,
            entry.principal(number, limits.get(entry.tenant, NO_LIMITS)),
            None if entry.expires is None else entry.expires.timestamp(),
        )
        for number, entry in enumerate(entries)
    )


def _tenant_limits(entries: Iterable[KeyEntry]) -> dict[str, Limits]:
    """Return the limits of tenants that have any.

    Raises:
        ValueError: if two entries give one tenant different ones.
    """
    by_tenant: dict[str, Limits] = {}
    for number, entry in enumerate(entries):
        if entry.tenant_limits is None:
            continue
        if by_tenant.setdefault(entry.tenant, entry.tenant_limits) != entry.tenant_limits:
            raise ValueError(
                f"key {number}: tenant_limits differ from those that {entry.tenant!r} has already"
            )
    return by_tenant


def _document(data: bytes, path: Path) -> Any:
    try:
        text = data.decode()
        _check_depth(text)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise ValueError(f"{path} is not YAML") from None
        line = min(mark.line, data.rstrip().count(b"\n")) + 1  # the end may be told as one more
        raise ValueError(f"{path} is not YAML at line {line}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text") from None
    except ValueError as error:  # too deep, or what looks like a date and is none
        raise ValueError(f"{path}: {error}") from None


def _check_depth(text: str) -> None:
    """Refuse what is nested so deeply that recursion would come to its end, in C without a word."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep, and recursion has a limit")


def _check_that_keys_differ(entries: Iterable[KeyEntry]) -> None:
    by_digest: dict[bytes, dict[int, str]] = defaultdict(dict)
    for number, entry in enumerate(entries):
        by_digest[entry.digest][number] = entry.tenant
    for same in (same for same in by_digest.values() if len(same) > 1):
        tenants = ", ".join(map(repr, dict.fromkeys(same.values())))
        raise ValueError(f"{' and '.join(map(str, same))} are the same key, of tenant {tenants}")


def _check_that_prefixes_differ(entries: Iterable[KeyEntry]) -> None:
    """Raise ValueError if a tenant may give names that are another one's."""
    first: dict[tuple[str, str], int] = {}
    for number, entry in enumerate(entries):
        if entry.loads_under is not None:
            first.setdefault((entry.loads_under, entry.tenant), number)
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
