"""Which entries of a key set are keys that tokens can be signed with."""

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from cluster.router.tenancy.oidc.key_set import MAX_KEYS, KeySet, parse_key_set
from tests.cluster.router.tenancy.oidc.issuer import Signer

ES = Signer("es")


def parsed(*entries: Any) -> list[str | None]:
    data = json.dumps({"keys": list(entries)}).encode()
    return [key.kid for key in parse_key_set(data)]


@pytest.mark.parametrize(
    "entry",
    [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "x"},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "x", "alg": "HS256"},
        ES.jwk(use="enc"),
        ES.jwk(key_ops=["sign"]),
        ES.jwk(key_ops="verify"),
        ES.jwk(alg="HS256"),
        ES.jwk(alg="RS256"),
        ES.jwk(alg=["ES256"]),
        ES.jwk(crv="secp256k1"),
        ES.jwk(crv=["P-256"]),
        ES.jwk(kty="RSA"),
        ES.jwk(kty=None),
        ES.jwk(x="AA"),
        ES.jwk(x=7),
        ES.jwk(kid=7),
        ES.jwk(d="AAAA"),
        {"kty": "RSA", "kid": "x"},
        {"kty": "RSA", "kid": "x", "n": "AQAB", "e": ""},
        {"kty": "OKP", "crv": "X25519", "x": "A" * 43, "kid": "x"},
        {},
    ],
)
def test_what_is_no_key_for_us_is_left_out(entry: dict[str, Any]) -> None:
    assert parsed(entry, ES.jwk()) == ["es"]
    with pytest.raises(ValueError, match="none of its 1 keys"):
        parsed(entry)


@pytest.mark.parametrize(("bits", "is_taken"), [(1024, False), (2048, True)])
def test_a_weak_key_is_none(bits: int, is_taken: bool) -> None:
    public = rsa.generate_private_key(65537, bits).public_key()
    entry = {**RSAAlgorithm.to_jwk(public, as_dict=True), "kid": "rs"}
    assert ("rs" in parsed(entry, ES.jwk())) == is_taken


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"keys": {}}', b'{"keys": [1]}', b"\xff", b"[" * 9999]
)
def test_what_is_no_key_set_is_told(data: bytes) -> None:
    with pytest.raises(ValueError, match="no JSON Web Key Set"):
        parse_key_set(data)


def test_a_key_set_has_a_limit() -> None:
    assert len(parsed(*[ES.jwk(kid=str(n)) for n in range(MAX_KEYS)])) == MAX_KEYS
    with pytest.raises(ValueError, match="101 keys"):
        parsed(*[ES.jwk(kid=str(n)) for n in range(MAX_KEYS + 1)])


def test_of_two_keys_of_one_name_and_kind_the_first_counts() -> None:
    other = Signer("es")
    keys = KeySet(parse_key_set(json.dumps({"keys": [ES.jwk(), other.jwk()]}).encode()))
    found = keys.get("es", "ES256")
    assert found is not None
    assert found.key.public_numbers() == ES.private.public_key().public_numbers()
    assert keys.get("es", "RS256") is None and keys.get(None, "ES256") is None
