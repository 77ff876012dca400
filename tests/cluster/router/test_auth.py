from pathlib import Path

import pytest

from cluster.errors import Unauthorized
from cluster.router.auth import KeyRing


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
def test_a_header_without_a_known_key_is_nobody(tmp_path: Path, header: str | None) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- {key: top-secret-1, tenant: a}")
    ring = KeyRing.load(path)
    with pytest.raises(Unauthorized):
        ring.identify(header)
    principal = ring.identify("bearer top-secret-1")
    assert (principal.tenant, principal.adapters, principal.admin) == ("a", frozenset(), False)
