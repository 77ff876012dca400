from hashlib import sha256
from pathlib import Path

import pytest

from cluster.api.auth import KeyRing
from cluster.errors import Forbidden, Unauthorized
from cluster.router.model_resolver import ANYONE


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
