"""API keys: the file of keys, and whose key an HTTP call carries.

Keys are kept as their SHA-256 only, and appear in no message.
"""

import hmac
from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import Request as HttpRequest

from cluster.errors import Unauthorized
from cluster.request import PRIORITY_MAX, PRIORITY_MIN
from cluster.router.model_resolver import ANYONE, Principal
from cluster.tenancy.limits import NO_LIMITS, Limits

MAX_WEIGHT = 1000


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
    limits: Limits = NO_LIMITS  # of this key
    # Of all keys of the tenant together; one of them is enough to say it.
    tenant_limits: Limits | None = None


_ENTRIES = TypeAdapter(list[KeyEntry])


def tenant_limits(entries: Iterable[KeyEntry]) -> dict[str, Limits]:
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


class KeyRing:
    """The keys that are known; a ring of none refuses all calls, unless keys are off."""

    def __init__(self, entries: list[KeyEntry], *, is_off: bool = False) -> None:
        """Take the keys.

        Raises:
            ValueError: if an entry has no key or two, or two entries have the same one.
        """
        self._is_off = is_off  # anyone may do anything
        self._principals: list[tuple[bytes, Principal]] = []
        limits_by_tenant = tenant_limits(entries)
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
                key_id=digest.hex()[:12],
                limits=entry.limits,
                tenant_limits=limits_by_tenant.get(entry.tenant, NO_LIMITS),
            )
            self._principals.append((digest, principal))
        self._check_that_keys_differ()

    @property
    def are_on(self) -> bool:
        """Whether callers need a key."""
        return not self._is_off

    def _check_that_keys_differ(self) -> None:
        numbers: dict[bytes, list[int]] = defaultdict(list)
        for number, (digest, _) in enumerate(self._principals):
            numbers[digest].append(number)
        for same in (same for same in numbers.values() if len(same) > 1):
            tenants = dict.fromkeys(repr(self._principals[number][1].tenant) for number in same)
            listed = " and ".join(map(str, same))
            raise ValueError(f"{listed} are the same key, of tenant {', '.join(tenants)}")

    @classmethod
    def load(cls, path: Path) -> "KeyRing":
        """Read a YAML list of keys, each with the fields of KeyEntry.

        Raises:
            ValueError: if the file is not such a list; the message holds no key.
        """
        try:
            document = yaml.safe_load(path.read_text())
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f" at line {mark.line + 1}" if mark is not None else ""
            raise ValueError(f"{path} is not YAML{line}") from None
        try:
            return cls(_ENTRIES.validate_python(document))
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{path}: {field}: {first['msg']}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def of_file(cls, path: str | None) -> "KeyRing":
        """Return the keys of a file as `load` does; without a file, keys are off."""
        return cls([], is_off=True) if path is None else cls.load(Path(path))

    def authenticate(self, http: HttpRequest) -> Principal:
        """Return who calls; raises as `identify`.

        A key may come as Anthropic's clients send it, in X-Api-Key; Authorization goes first.
        """
        if self._is_off:
            return ANYONE
        authorization, key = http.headers.get("authorization"), http.headers.get("x-api-key")
        if authorization is None and key is not None:
            authorization = f"Bearer {key}"
        return self.identify(authorization)

    def identify(self, authorization: str | None) -> Principal:
        """Return whose key an Authorization header carries.

        Raises:
            Unauthorized: if there is none, or an unknown one.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY")
        presented = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matching: Principal | None = None
        for digest, principal in self._principals:  # all of them, whichever matches
            if hmac.compare_digest(digest, presented):
                matching = principal
        if matching is None:
            raise Unauthorized("unknown API key", code="invalid_api_key")
        return matching
