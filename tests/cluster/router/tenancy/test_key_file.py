"""What a file of keys may say, and what is told of one that cannot be used."""

from hashlib import sha256
from pathlib import Path

import pytest

from cluster.router.tenancy import yaml_list
from cluster.router.tenancy.key_file import KnownKey, read_keys
from cluster.router.tenancy.principal import SCOPES


def keys_of(tmp_path: Path, text: str) -> tuple[KnownKey, ...]:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return read_keys(path)


LOADING = "scopes: ['adapters:load'], adapter_prefix"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- {tenant: a}", "needs either key or key_sha256"),
        ("- {key: top-secret-1, key_sha256: " + "a" * 64 + ", tenant: a}", "needs either"),
        ("- {key: top-secret-1}", "tenant"),
        ("- {key: top-secret-1, tenant: a, admn: true}", "admn"),
        ("- {key: [top-secret-1], tenant: a}", "0.key"),
        ("top-secret-1", "valid list"),
        ("- {key: top-secret-1", "is not YAML"),
        ("- {key: short, tenant: a}", "at least 8"),
        ("- {key: top-secret-1, tenant: a, weight: 0}", "weight"),
        ("- {key: top-secret-1, tenant: a, weight: 1001}", "weight"),
        ("- {key: top-secret-1, tenant: a, weight: 1.5}", "weight"),
        ("- {key: top-secret-1, tenant: a, min_priority: -2147483649}", "min_priority"),
        ("- {key: top-secret-1, tenant: a, adapters: [a*b]}", "at the end only"),
        ("- {key: top-secret-1, tenant: a, scopes: [admin]}", "0.scopes.0: Input should be"),
        ("- {key: top-secret-1, tenant: a, scopes: ['adapters:load']}", "needs an adapter_prefix"),
        ("- {key: top-secret-1, tenant: a, adapter_prefix: a/}", "needs the scope"),
        ("- {key: top-secret-1, tenant: a, adapter_root: /a}", "needs the scope"),
        (
            f"- {{key: top-secret-1, tenant: a, {LOADING}: a/, adapter_root: a}}",
            "0.adapter_root: String should match",
        ),
        ("- {key: top-secret-1, tenant: a, admin: true, adapter_prefix: a/}", "all names"),
        ("- {key: top-secret-1, tenant: a, admin: true, adapter_root: /a}", "all names"),
        ("- {key: top-secret-1, tenant: a, expires: 2027-01-31}", "with a zone"),
        ("- {key: top-secret-1, tenant: a, expires: 2027-01-31T12:00:00}", "with a zone"),
        ("- {key: top-secret-1, tenant: a, expires: '2027-01-31T12:00:00'}", "with a zone"),
        ("- {key: top-secret-1, tenant: a, expires: 1801396800}", "with a zone"),
        ("- {key: top-secret-1, tenant: a, expires: soon}", "with a zone"),
        (
            "- {key: top-secret-1, tenant: a}\n- {key: top-secret-2, tenant: a}\n"
            "- {key: top-secret-1, tenant: b}",
            "keys.yaml: 0 and 2 are the same key, of tenant 'a', 'b'",
        ),
        (
            "- {key: top-secret-1, tenant: a}\n"
            f"- {{key_sha256: {sha256(b'top-secret-1').hexdigest().upper()}, tenant: a}}",
            "0 and 1 are the same key, of tenant 'a'",
        ),
        (
            f"- {{key: top-secret-1, tenant: a, {LOADING}: team/a/}}\n"
            f"- {{key: top-secret-2, tenant: c, {LOADING}: team}}\n"
            f"- {{key: top-secret-3, tenant: b, {LOADING}: other/}}",
            "1 and 0: the adapter_prefix 'team' of tenant 'c' is the beginning of 'team/a/' of",
        ),
    ],
)
def test_a_bad_key_file_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        keys_of(tmp_path, text)
    assert "top-secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 300_000, "- " * 5000 + "a", "{a: " * 65 + "}" * 65])
def test_what_is_nested_deeply_is_refused(tmp_path: Path, text: str) -> None:
    # Newer readers of YAML have a limit of their own.
    with pytest.raises(ValueError, match="recursion has a limit|is not YAML"):
        keys_of(tmp_path, text)


def test_a_file_that_is_too_large_is_no_file_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_list, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match="over the limit of 10"):
        keys_of(tmp_path, "- {key: top-secret-1, tenant: a}")


def test_an_entry_that_says_no_more_than_it_must_may_ask_the_base_model(tmp_path: Path) -> None:
    (key,) = keys_of(tmp_path, "- {key: top-secret-1, tenant: a}")
    assert key.digest == sha256(b"top-secret-1").digest()
    assert key.expires is None
    caller = key.principal
    assert (caller.tenant, caller.key_name, caller.cache_group) == ("a", "#0", "a")
    assert (caller.scopes, caller.min_priority, caller.weight) == (frozenset(), 0, 1)
    assert not caller.may_use("law") and not caller.may_see("law")


def test_a_tenant_may_have_several_keys_with_rights_of_their_own(tmp_path: Path) -> None:
    first, second, third = keys_of(
        tmp_path,
        f"""
- {{key: top-secret-1, tenant: acme, name: ci, {LOADING}: acme/, adapter_root: /models/acme}}
- {{key: top-secret-2, tenant: acme, {LOADING}: acme/dev-, cache_group: labs, weight: 7}}
- {{key: top-secret-3, tenant: ops, admin: true, adapters: [law]}}
""",
    )
    assert (first.principal.key_name, first.principal.adapter_root) == ("ci", "/models/acme")
    assert (second.principal.key_name, second.principal.cache_group) == ("#1", "labs")
    assert second.principal.weight == 7
    assert first.principal.may_use("acme/law") and not first.principal.may_use("law")
    assert second.principal.may_use("acme/dev-1") and not second.principal.may_use("acme/law")
    admin = third.principal
    assert admin.scopes == SCOPES and admin.may_see("acme/law")
    admin.require_name("acme/law")
    # Its requests may name what the entry says; the right to change it is another one.
    assert admin.may_use("law") and not admin.may_use("acme/law")


@pytest.mark.parametrize(
    "text", ["2027-01-31T12:00:00Z", "'2027-01-31T12:00:00Z'", "2027-01-31 13:00:00 +01:00"]
)
def test_the_end_of_a_key_is_a_moment_in_yamls_form_or_as_a_text(tmp_path: Path, text: str) -> None:
    (key,) = keys_of(tmp_path, f"- {{key: top-secret-1, tenant: a, expires: {text}}}")
    assert key.expires == 1801396800.0
