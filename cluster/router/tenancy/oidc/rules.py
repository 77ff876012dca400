"""The file of rules that say what the holder of a token may do, by the token's claims.

Owns how a claim is found and compared. The first rule whose `match` fits a token is its rule; one
that no rule fits opens nothing.
"""

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, model_validator

from cluster.errors import Forbidden
from cluster.router.tenancy.oidc.verifier import Claims
from cluster.router.tenancy.principal import Principal
from cluster.router.tenancy.rights import Rights, check_prefixes, tenant_limits_of
from cluster.router.tenancy.yaml_list import parse_entries, read_file
from cluster.tenancy.limits import NO_LIMITS

CODE = "insufficient_scope"  # RFC 6750's
TENANT = "{tenant}"  # what stands for the tenant in a rule's texts
_SPACED = frozenset({"scope", "scp"})  # claims that hold words with spaces between
# A claim's text becomes part of names and paths: no slash, no *, no dot at the beginning.
_TENANT_FORM = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._@:+-]{0,126}[A-Za-z0-9])?")
_Scalar = Annotated[str | bool | int, Field(union_mode="left_to_right")]
_ClaimName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class TokenRule(Rights):
    """Which tokens are meant, whose they are, and what their holders may do."""

    # By claim: the value that it must have, or hold as one of several; a list: one of these.
    match: dict[_ClaimName, _Scalar | Annotated[list[_Scalar], Field(min_length=1)]]
    tenant: Annotated[str, Field(min_length=1)] | None = None
    tenant_claim: _ClaimName | None = None  # whose value is the tenant
    # Before that value, so that no claim can name a tenant that has keys.
    tenant_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@:+-]*$")] | None = None

    @model_validator(mode="after")
    def _check(self) -> "TokenRule":
        if (self.tenant is None) == (self.tenant_claim is None):
            raise ValueError("needs either tenant or tenant_claim")
        if self.tenant_prefix is not None and self.tenant_claim is None:
            raise ValueError("tenant_prefix needs tenant_claim")
        self.check_rights()
        if self.tenant is None and self.loads_under is not None and self.load_stem is None:
            raise ValueError(
                f"adapter_prefix must have {TENANT}/ in it where tenant_claim names the tenant: "
                "tenants could load under each other's names otherwise"
            )
        return self

    @property
    def load_stem(self) -> str | None:
        """What stands before the tenant where names that may be loaded are each tenant's own."""
        stem, found, _ = (self.loads_under or "").partition(f"{TENANT}/")
        return stem if found and self.tenant is None else None

    def fits(self, claims: Claims) -> bool:
        """Tell whether a token is meant."""
        return all(
            any(_is_one_of(value, found_values(claims.values, name)) for value in _listed(wanted))
            for name, wanted in self.match.items()
        )

    def principal(self, claims: Claims, issuer: str) -> Principal:
        """Return who holds a token that is meant.

        Raises:
            Forbidden: if its claim names no tenant.
        """
        tenant = self.tenant or self._claimed_tenant(claims)
        own = {
            field: text.replace(TENANT, tenant)
            for field in ("adapter_prefix", "adapter_root", "cache_group")
            if (text := getattr(self, field)) is not None
        }
        adapters = self.adapters
        if adapters != "*":
            adapters = [pattern.replace(TENANT, tenant) for pattern in adapters]
        rights = self.model_copy(update={**own, "adapters": adapters})
        who = f"{len(issuer)}:{issuer}{claims.subject}"
        key_id = sha256(who.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        limits = self.tenant_limits or NO_LIMITS
        return rights.principal_of(tenant, claims.subject, key_id, limits, issuer)

    def _claimed_tenant(self, claims: Claims) -> str:
        assert self.tenant_claim is not None, "a rule has either"
        values = found_values(claims.values, self.tenant_claim)
        if len(values) != 1 or not isinstance(values[0], str):
            raise Forbidden(
                f"the claim {self.tenant_claim!r} of this token names no tenant", code=CODE
            )
        tenant = f"{self.tenant_prefix or ''}{values[0]}"
        if _TENANT_FORM.fullmatch(tenant) is None:
            raise Forbidden(
                f"the claim {self.tenant_claim!r} of this token cannot name a tenant: 1 to 128 "
                "letters, digits and ._@:+- with a letter or digit at both ends are wanted",
                code=CODE,
            )
        return tenant


_RULES = TypeAdapter(list[TokenRule])


def read_rules(path: Path) -> tuple[TokenRule, ...]:
    """Return the rules of a file, a YAML list of entries with the fields of TokenRule.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not such a list.
    """
    return parse_rules(read_file(path), path)


def parse_rules(data: bytes, path: Path) -> tuple[TokenRule, ...]:
    """Return the rules that the bytes of a file hold; raises as `read_rules`."""
    rules = parse_entries(_RULES, data, path)
    fixed = [(number, rule, rule.tenant) for number, rule in enumerate(rules) if rule.tenant]
    try:
        limits = tenant_limits_of((n, tenant, rule.tenant_limits) for n, rule, tenant in fixed)
        prefixes = [
            (number, rule.loads_under.replace(TENANT, tenant), tenant)
            for number, rule, tenant in fixed
            if rule.loads_under is not None
        ]
        check_prefixes(prefixes)
        _check_stems(rules, prefixes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tuple(
        rule.model_copy(update={"tenant_limits": limits[rule.tenant]})
        if rule.tenant in limits
        else rule
        for rule in rules
    )


def principal_of(rules: Sequence[TokenRule], claims: Claims, issuer: str) -> Principal:
    """Return who holds a token.

    Raises:
        Forbidden: if no rule fits it, or its rule finds no tenant.
    """
    for rule in rules:
        if rule.fits(claims):
            return rule.principal(claims, issuer)
    raise Forbidden("no rule of this server gives the holder of this token any right", code=CODE)


def found_values(claims: dict[str, Any], name: str) -> tuple[Any, ...]:
    """Return the values of a claim: of a list each, of a text of scopes each word.

    A name with dots is a claim of this very name, or else leads into objects.
    """
    value = claims.get(name)
    if name not in claims and "." in name:
        value = claims
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, str):
        return tuple(value.split()) if name in _SPACED else (value,)
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def _check_stems(rules: Iterable[TokenRule], prefixes: list[tuple[int, str, str]]) -> None:
    """Refuse names of one tenant that may be those of another one, whatever claims say."""
    stems = {stem: None for rule in rules if (stem := rule.load_stem) is not None}
    if len(stems) > 1:
        raise ValueError(
            f"adapter_prefix: what stands before {TENANT}/ differs ({', '.join(map(repr, stems))})"
            ": a name could be two tenants' own"
        )
    for stem in stems:
        for number, prefix, tenant in prefixes:
            is_own = prefix.startswith(f"{stem}{tenant}/")
            if (prefix.startswith(stem) or stem.startswith(prefix)) and not is_own:
                raise ValueError(
                    f"{number}: the adapter_prefix {prefix!r} of tenant {tenant!r} could be of a "
                    f"tenant that a claim names: {stem + TENANT + '/'!r}"
                )


def _listed(wanted: object) -> list[object]:
    return wanted if isinstance(wanted, list) else [wanted]


def _is_one_of(value: object, found: tuple[Any, ...]) -> bool:
    """Tell whether a value is there; true is not 1."""
    return any(type(one) is type(value) and one == value for one in found)
