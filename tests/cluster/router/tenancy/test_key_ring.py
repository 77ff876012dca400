"""Whose key is presented, and until when."""

from pathlib import Path

import pytest

from cluster.errors import Unauthorized
from cluster.router.tenancy.key_file import parse_keys
from cluster.router.tenancy.key_ring import KeyRing


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def ring_of(text: str, clock: Clock | None = None) -> KeyRing:
    return KeyRing(parse_keys(text.encode(), Path("keys.yaml")), clock or Clock())


def refusal(ring: KeyRing, key: str) -> str | None:
    with pytest.raises(Unauthorized) as caught:
        ring.identify(key)
    assert key == "" or key not in caught.value.message
    return caught.value.code


def test_a_known_key_is_its_tenants_and_others_are_nobodys() -> None:
    ring = ring_of("[{key: top-secret-1, tenant: a}, {key: top-secret-2, tenant: b}]")
    assert ring.identify("top-secret-1").tenant == "a"
    assert ring.identify(" top-secret-2 ").tenant == "b"
    for key in ("", "top-secret-", "top-secret-11", "TOP-SECRET-1", "\udcff", "\xff"):
        assert refusal(ring, key) == "invalid_api_key"


def test_a_ring_without_keys_refuses_everybody() -> None:
    assert refusal(ring_of("[]"), "top-secret-1") == "invalid_api_key"


def test_a_key_ends_at_its_time_while_the_others_of_its_tenant_go_on() -> None:
    clock = Clock()
    ring = ring_of(
        "- {key: top-secret-1, tenant: a, expires: 1970-01-01T00:16:50Z}\n"
        "- {key: top-secret-2, tenant: a}\n",
        clock,
    )
    clock.now = 1009.9
    assert ring.identify("top-secret-1").tenant == "a"
    clock.now = 1010.0
    assert refusal(ring, "top-secret-1") == "expired_api_key"
    assert ring.identify("top-secret-2").tenant == "a"


def test_keys_are_rotated_without_a_moment_in_which_neither_counts() -> None:
    old, new = "{key: top-secret-1, tenant: a}", "{key: top-secret-2, tenant: a}"
    ring = ring_of(f"[{old}]")
    assert refusal(ring, "top-secret-2") == "invalid_api_key"
    for text, known in ((f"[{old}, {new}]", {1, 2}), (f"[{new}]", {2})):
        ring.replace(parse_keys(text.encode(), Path("keys.yaml")))
        assert len(ring) == len(known)
        for number in (1, 2):
            key = f"top-secret-{number}"
            if number in known:
                assert ring.identify(key).tenant == "a"
            else:
                assert refusal(ring, key) == "invalid_api_key"
