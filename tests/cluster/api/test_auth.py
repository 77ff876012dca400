from hashlib import sha256
from pathlib import Path

import pytest

from cluster.api.auth import KeyRing
from cluster.errors import Forbidden, InvalidRequest, Unauthorized
from cluster.router.model_resolver import ANYONE
from cluster.tenancy.limits import Limits


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
    ],
)
def test_a_bad_key_file_is_refused_without_showing_a_key(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason) as caught:
        KeyRing.load(path)
    assert "top-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic top-secret-1", "top-secret-1", "Bearer \xff"]
)
def test_a_header_without_a_known_key_is_refused(tmp_path: Path, header: str | None) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- {key: top-secret-1, tenant: a}")
    ring = KeyRing.load(path)
    with pytest.raises(Unauthorized):
        ring.identify(header)
    principal = ring.identify("bearer top-secret-1")
    assert (principal.tenant, principal.adapters, principal.admin) == ("a", frozenset(), False)
    assert (principal.min_priority, principal.weight) == (0, 1)


@pytest.mark.parametrize(
    ("least", "allowed", "refused", "default"),
    [(0, 0, -1, 0), (-5, -5, -6, 0), (3, 3, 2, 3), (-(2**31), -(2**31), None, 0)],
)
def test_a_key_may_not_go_before_its_least_priority(
    tmp_path: Path, least: int, allowed: int, refused: int | None, default: int
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {{key: top-secret-1, tenant: a, min_priority: {least}, weight: 1000}}")
    principal = KeyRing.load(path).identify("Bearer top-secret-1")
    assert principal.priority(allowed) == allowed
    assert principal.priority(2**31 - 1) == 2**31 - 1
    assert principal.priority(None) == default
    if refused is not None:
        with pytest.raises(Forbidden, match=f"{refused} is less than {least}"):
            principal.priority(refused)
    assert principal.weight == 1000


def test_without_keys_every_priority_is_allowed_and_there_is_no_tenant() -> None:
    assert ANYONE.priority(-(2**31)) == -(2**31)
    assert (ANYONE.tenant, ANYONE.weight) == ("", 1)


LIMITED = """
- {key: top-secret-1, tenant: a, limits: {requests_per_minute: 5}}
- {key: top-secret-2, tenant: a, tenant_limits: {tokens_per_minute: 9, max_output_tokens: 3}}
- {key: top-secret-3, tenant: a, tenant_limits: {tokens_per_minute: 9, max_output_tokens: 3}}
- {key: top-secret-4, tenant: b, limits: {max_prompt_tokens: 2}}
"""


def test_limits_are_of_a_key_and_of_all_keys_of_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(LIMITED)
    one, two, _, other = (
        KeyRing.load(path).identify(f"Bearer top-secret-{n}") for n in range(1, 5)
    )
    assert one.key_id == sha256(b"top-secret-1").hexdigest()[:12]
    assert one.counted_limits() == {
        f"key:{one.key_id}": Limits(requests_per_minute=5),
        "tenant:a": Limits(tokens_per_minute=9, max_output_tokens=3),
    }
    assert list(two.counted_limits()) == ["tenant:a"]
    assert one.max_output_tokens == two.max_output_tokens == 3
    assert other.counted_limits() == ANYONE.counted_limits() == {}
    other.check_prompt(2)
    with pytest.raises(InvalidRequest, match="has 3 tokens, and this key may send 2"):
        other.check_prompt(3)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("tenant_limits: {tokens_per_minute: 8, max_output_tokens: 3}", "'a' has already"),
        ("limits: {requests_per_minute: 0}", "greater than or equal to 1"),
        ("limits: {requests_a_minute: 1}", "requests_a_minute"),
        ("limits: {max_concurrency: 1.5}", "max_concurrency"),
        ("limits: 5", "limits"),
    ],
)
def test_limits_that_say_nothing_or_contradict_each_other_are_refused(
    tmp_path: Path, more: str, reason: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"{LIMITED}- {{key: top-secret-5, tenant: a, {more}}}")
    with pytest.raises(ValueError, match=reason):
        KeyRing.load(path)
