"""What a caller may use, see and change, and which priorities it may ask for."""

from dataclasses import replace

import pytest

from cluster.errors import Forbidden
from cluster.router.tenancy.principal import (
    ALL_NAMES,
    ANONYMOUS,
    ANYONE,
    SCOPES,
    NamePatterns,
    Principal,
)

TENANT = Principal(
    tenant="acme",
    adapters=NamePatterns.of(["shared", "team/*", "acme/*"]),
    scopes=frozenset({"adapters:load"}),
    adapter_prefix="acme/",
)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("law", ["law"], ["la", "laws", "Law", ""]),
        ("law*", ["law", "laws", "law/x"], ["la", "a-law"]),
        ("acme/*", ["acme/", "acme/a/b"], ["acme", "acme-corp/a"]),
        ("*", ["", "anything"], []),
    ],
)
def test_a_pattern_is_a_name_or_how_names_begin(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    patterns = NamePatterns.of([pattern])
    assert all(patterns.match(name) for name in matching)
    assert not any(patterns.match(name) for name in others)
    assert not any(NamePatterns.of([]).match(name) for name in matching + others)


@pytest.mark.parametrize("pattern", ["a*b", "*a", "**", "a**"])
def test_a_star_elsewhere_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="at the end only"):
        NamePatterns.of(["law", pattern])


def test_a_key_that_loads_changes_names_under_its_prefix_only() -> None:
    TENANT.require_name("acme/law")
    for name in ("shared", "team/law", "other/law", "acme", ""):
        with pytest.raises(Forbidden, match="begin with 'acme/'"):
            TENANT.require_name(name)
    with pytest.raises(Forbidden, match="the scope adapters:load, or admin right"):
        replace(TENANT, scopes=frozenset({"adapters:read"})).require_name("acme/law")


def test_what_may_be_used_is_seen_and_a_reader_sees_more_than_it_may_use() -> None:
    reader = Principal(
        tenant="acme",
        adapters=NamePatterns.of(["shared"]),
        scopes=frozenset({"adapters:read"}),
        adapter_prefix="acme/",
    )
    for name, is_used, is_seen in (
        ("shared", True, True),
        ("acme/law", False, True),
        ("other/law", False, False),
    ):
        assert (reader.may_use(name), reader.may_see(name)) == (is_used, is_seen)
    assert not replace(reader, scopes=frozenset({"metrics"})).may_see("acme/law")


@pytest.mark.parametrize(
    ("least", "allowed", "refused", "default"),
    [(0, 0, -1, 0), (-5, -5, -6, 0), (3, 3, 2, 3), (-(2**31), -(2**31), None, 0)],
)
def test_a_key_may_not_go_before_its_least_priority(
    least: int, allowed: int, refused: int | None, default: int
) -> None:
    principal = replace(TENANT, min_priority=least)
    assert principal.priority(allowed) == allowed
    assert principal.priority(2**31 - 1) == 2**31 - 1
    assert principal.priority(None) == default
    if refused is not None:
        with pytest.raises(Forbidden, match=f"{refused} is less than {least}"):
            principal.priority(refused)


def test_without_keys_every_priority_is_allowed_and_there_is_no_tenant() -> None:
    for caller in (ANYONE, ANONYMOUS):
        assert caller.priority(-(2**31)) == -(2**31)
        assert (caller.tenant, caller.weight, caller.adapters) == ("", 1, ALL_NAMES)


def test_without_keys_everybody_may_change_what_is_served_unless_that_is_anybody() -> None:
    assert ANYONE.scopes == SCOPES
    for scope in SCOPES - {"adapters:read", "metrics"}:
        ANYONE.require(scope)
        with pytest.raises(Forbidden, match=scope):
            ANONYMOUS.require(scope)
    ANONYMOUS.require("metrics")
    assert ANONYMOUS.may_see("law")


def test_callers_share_cached_prefixes_within_a_group_only() -> None:
    first, second = Principal(tenant="a", cache_group="a"), Principal(tenant="b", cache_group="b")
    assert first.cache_salt(None) != second.cache_salt(None)
    assert first.cache_salt("s") == Principal(tenant="c", cache_group="a").cache_salt("s")
    # No salt of one group spells another one's.
    spelling = Principal(tenant="x", cache_group="1")
    for salt in ("", "1", ":a", "1:a", "a"):
        assert spelling.cache_salt(salt) != Principal(tenant="y", cache_group="1:").cache_salt("")
        assert spelling.cache_salt(salt) not in (first.cache_salt(""), first.cache_salt(None))
    assert ANYONE.cache_salt("s") == "s" and ANYONE.cache_salt(None) == ""
