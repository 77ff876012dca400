"""What claims make of the holder of a token."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import Forbidden
from cluster.router.tenancy.oidc.rules import TokenRule, found_values, parse_rules, principal_of
from cluster.router.tenancy.oidc.verifier import Claims
from cluster.router.tenancy.principal import SCOPES, Principal
from cluster.tenancy.limits import Limits

ISSUER = "https://id.example"
CLAIMED = "{match: {}, tenant_claim: a, scopes: ['adapters:load']"
PATH = Path("rules.yaml")
RULES = """
- match: {groups: [platform, sre]}
  tenant: ops
  admin: true
  adapters: "*"
- match: {realm_access.roles: trainer, email_verified: true}
  tenant_claim: org_id
  scopes: [adapters:load]
  adapter_prefix: "{tenant}/"
  adapter_root: "/adapters/{tenant}"
  adapters: ["shared", "{tenant}-*"]
  limits: {requests_per_minute: 60, max_adapters: 3}
  tenant_limits: {max_concurrency: 8}
  weight: 2
  min_priority: -1
- match: {scope: inference}
  tenant_claim: org_id
  tenant_prefix: sso-
  cache_group: "{tenant}:all"
"""


def rules_of(text: str) -> tuple[TokenRule, ...]:
    return parse_rules(text.encode(), PATH)


def holder(rules: tuple[TokenRule, ...], subject: str = "user-7", **values: Any) -> Principal:
    return principal_of(rules, Claims(subject, 0.0, values), ISSUER)


def refusal(rules: tuple[TokenRule, ...], **values: Any) -> str:
    with pytest.raises(Forbidden) as caught:
        holder(rules, **values)
    assert caught.value.code == "insufficient_scope"
    return caught.value.message


def test_the_first_rule_that_fits_says_who_calls() -> None:
    rules = rules_of(RULES)
    trainer = {"realm_access": {"roles": ["a", "trainer"]}, "email_verified": True}
    admin = holder(rules, groups=["x", "sre"], org_id="acme", **trainer)
    assert (admin.tenant, admin.scopes, admin.issuer, admin.key_name) == (
        "ops",
        SCOPES,
        ISSUER,
        "user-7",
    )
    acme = holder(rules, org_id="acme", **trainer)
    assert (acme.tenant, acme.cache_group, acme.weight, acme.min_priority) == (
        "acme",
        "acme",
        2,
        -1,
    )
    assert (acme.adapter_prefix, acme.adapter_root) == ("acme/", "/adapters/acme")
    assert [n for n in ("shared", "acme-1", "acme/law", "acm", "b/x") if acme.may_use(n)] == [
        "shared",
        "acme-1",
        "acme/law",
    ]
    assert acme.limits == Limits(requests_per_minute=60, max_adapters=3)
    assert acme.tenant_limits == Limits(max_concurrency=8)
    user = holder(rules, org_id="acme", scope="openid inference")
    assert (user.tenant, user.cache_group, user.scopes) == ("sso-acme", "sso-acme:all", frozenset())


def test_a_token_that_no_rule_fits_opens_nothing() -> None:
    rules = rules_of(RULES)
    roles = {"realm_access": {"roles": ["trainer"]}}
    for values in (
        {},
        {"groups": "other"},
        {"groups": [["sre"]]},
        {"groups": {"sre": True}},
        {"scope": "inference2", "org_id": "acme"},
        {**roles, "org_id": "acme", "email_verified": "true"},
        {**roles, "org_id": "acme", "email_verified": 1},
        {"realm_access": "trainer", "org_id": "acme", "email_verified": True},
    ):
        assert "no rule" in refusal(rules, **values)
    assert "no rule" in refusal(())


@pytest.mark.parametrize(
    "org",
    ["", "..", ".a", "a/", "a/b", "*", "a*", "a b", "a\0", "{tenant}", "a\n", "é", "a" * 129, "-a"],
)
def test_a_claim_cannot_spell_what_is_no_tenant(org: str) -> None:
    trainer = {"realm_access": {"roles": ["trainer"]}, "email_verified": True}
    assert "cannot name a tenant" in refusal(rules_of(RULES), org_id=org, **trainer)


@pytest.mark.parametrize("org", [None, 7, ["a", "b"], [], {"id": "a"}, True])
def test_a_claim_that_is_no_text_names_no_tenant(org: object) -> None:
    values = {"scope": "inference"} if org is None else {"scope": "inference", "org_id": org}
    assert "names no tenant" in refusal(rules_of(RULES), **values)


def test_holders_differ_by_subject_and_issuer_not_by_token() -> None:
    rules = rules_of("[{match: {}, tenant: a}]")
    one, same, other = (holder(rules, name, jti=n).key_id for n, name in enumerate("aab"))
    elsewhere = principal_of(rules, Claims("a", 0.0, {}), "https://id2.example").key_id
    assert one == same and len({one, other, elsewhere}) == 3


def test_a_name_with_dots_is_a_claim_of_this_name_first() -> None:
    assert found_values({"a.b": "x", "a": {"b": "y"}}, "a.b") == ("x",)
    assert found_values({"a": {"b": ["y", 1]}}, "a.b") == ("y", 1)
    assert found_values({"https://acme.com/roles": ["z"]}, "https://acme.com/roles") == ("z",)
    assert found_values({"a": {"b": None}}, "a.b") == found_values({}, "a.b") == ()
    assert found_values({"a.b": None, "a": {"b": "y"}}, "a.b") == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[{tenant: a}]", "match"),
        ("[{match: {}}]", "tenant or tenant_claim"),
        ("[{match: {}, tenant: a, tenant_claim: b}]", "tenant or tenant_claim"),
        ("[{match: {}, tenant: a, tenant_prefix: b}]", "tenant_prefix"),
        ("[{match: {}, tenant_claim: a, tenant_prefix: b/}]", "tenant_prefix"),
        ("[{match: {a: []}, tenant: a}]", "match"),
        ("[{match: {a: {b: c}}, tenant: a}]", "match"),
        ("[{match: {}, tenant: a, key: abcdefgh}]", "key"),
        ("[{match: {}, tenant: a, scopes: ['adapters:load']}]", "adapter_prefix"),
        (
            "[{match: {}, tenant_claim: a, scopes: ['adapters:load'], adapter_prefix: x/}]",
            "{tenant}/",
        ),
        (
            "[{match: {}, tenant_claim: a, scopes: ['adapters:load'], adapter_prefix: '{tenant}'}]",
            "{tenant}/",
        ),
        (
            f"- {CLAIMED}, adapter_prefix: '{{tenant}}/'}}\n"
            f"- {CLAIMED}, adapter_prefix: 't/{{tenant}}/'}}",
            "two tenants' own",
        ),
        (
            f"- {CLAIMED}, adapter_prefix: '{{tenant}}/'}}\n"
            "- {match: {}, tenant: ops, scopes: ['adapters:load'], adapter_prefix: 'shared/'}",
            "could be of a tenant",
        ),
        (
            "- {match: {}, tenant: a, scopes: ['adapters:load'], adapter_prefix: 'x/'}\n"
            "- {match: {}, tenant: b, scopes: ['adapters:load'], adapter_prefix: 'x/y/'}",
            "the beginning of",
        ),
        (
            "- {match: {}, tenant: a, tenant_limits: {max_concurrency: 1}}\n"
            "- {match: {}, tenant: a, tenant_limits: {max_concurrency: 2}}",
            "differ",
        ),
        ("{}", "list"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        rules_of(text)
    assert str(caught.value).startswith("rules.yaml: ")


def test_limits_of_a_tenant_hold_for_all_its_rules() -> None:
    rules = rules_of(
        "- {match: {a: 1}, tenant: t, tenant_limits: {max_concurrency: 1}}\n"
        "- {match: {a: 2}, tenant: t}"
    )
    assert holder(rules, a=2).tenant_limits == Limits(max_concurrency=1)


names = st.text(alphabet="ab/.{}*-", max_size=6)


@given(names, names, names)
def test_no_tenant_of_a_claim_may_give_a_name_that_is_anothers(
    one: str, two: str, name: str
) -> None:
    rules = rules_of(
        "- {match: {}, tenant_claim: t, scopes: ['adapters:load'], adapter_prefix: 'x/{tenant}/y'}"
    )
    holders = []
    for tenant in (one, two):
        try:
            holders.append(holder(rules, t=tenant))
        except Forbidden:
            return
    first, second = holders
    is_both = all(f"x/{name}".startswith(h.adapter_prefix) for h in (first, second))
    assert first.tenant == second.tenant or not is_both
    both = (first.adapter_prefix, second.adapter_prefix)
    assert one == two or not both[0].startswith(both[1])
