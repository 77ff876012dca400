"""Tokens that are the issuer's, for us and of this time, and all the others."""

import hmac
import json
from hashlib import sha256
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import Unauthorized
from cluster.router.tenancy.oidc.key_set import KeySet, parse_key_set
from cluster.router.tenancy.oidc.verifier import MAX_TOKEN, Claims, TokenVerifier
from tests.cluster.router.tenancy.oidc.issuer import NOW, Signer, key_set, segment

ISSUER = "https://id.example"
GOOD: dict[str, Any] = {"iss": ISSUER, "aud": "topwork", "sub": "user-7", "exp": NOW + 300}
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
SIGNERS = {name: Signer(name, name) for name in (*ALGORITHMS, "EdDSA")}
KEYS = KeySet(parse_key_set(key_set(*SIGNERS.values())))
ES, RS = SIGNERS["ES256"], SIGNERS["RS256"]
VERIFIER = TokenVerifier(ISSUER, ("other", "topwork"), 30.0)


def verify(token: str, keys: KeySet = KEYS, now: float = NOW) -> Claims:
    return VERIFIER.verify(token, keys, now)


def refusal(token: str, keys: KeySet = KEYS, now: float = NOW) -> str:
    with pytest.raises(Unauthorized) as caught:
        verify(token, keys, now)
    assert caught.value.code == "invalid_token"
    assert len(caught.value.message) < 300
    assert len(token) < 20 or token not in caught.value.message
    return caught.value.message


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {name: v for name, v in (GOOD | changes).items() if name not in names}


@pytest.mark.parametrize("signer", SIGNERS.values(), ids=list(SIGNERS))
def test_each_asymmetric_algorithm_is_taken_and_one_changed_byte_is_not(signer: Signer) -> None:
    token = signer.token(GOOD | {"roles": ["a"]})
    claims = verify(token)
    assert (claims.subject, claims.expires, claims.values["roles"]) == ("user-7", NOW + 300, ["a"])
    head, payload, signature = token.split(".")
    forged = segment(GOOD | {"sub": "root"})
    assert "signature" in refusal(f"{head}.{forged}.{signature}")
    other = ("A" if signature[5] != "A" else "B").join((signature[:5], signature[6:]))
    assert "signature" in refusal(f"{head}.{payload}.{other}")


def test_an_algorithm_that_needs_no_private_key_is_none() -> None:
    payload = segment(GOOD)
    for alg in ("none", "None", "NONE", "HS256", "HS512", "ES256K", "", "dir"):
        head = segment({"alg": alg, "kid": "RS256", "typ": "JWT"})
        # A verifier that lets the token choose takes the public key for the secret of an HMAC.
        mac = hmac.new(RS.public_pem, f"{head}.{payload}".encode(), sha256).digest()
        assert "algorithm" in refusal(f"{head}.{payload}.{segment(mac)}")
    unsigned = jwt.encode(GOOD, None, "none")
    assert "no signed" in refusal(unsigned)


def test_a_key_verifies_only_what_it_is_made_for() -> None:
    head = segment({"alg": "ES256", "kid": "RS256"})
    signature = ES.token(GOOD).rpartition(".")[2]
    assert "does not have" in refusal(f"{head}.{segment(GOOD)}.{signature}")
    only = KeySet(parse_key_set(json.dumps({"keys": [RS.jwk(alg="RS256")]}).encode()))
    verify(RS.token(GOOD), only)
    pss = jwt.encode(GOOD, RS.private, "PS256", headers={"kid": "RS256"})
    verify(pss)
    assert "does not have" in refusal(pss, only)


def test_keys_and_their_addresses_in_a_header_are_never_looked_at() -> None:
    stranger = Signer("ES256")
    for header in (
        {"jwk": stranger.jwk()},
        {"jku": "http://127.0.0.1:1/keys"},
        {"x5u": "http://127.0.0.1:1/cert"},
        {"x5c": ["MII="]},
    ):
        assert "signature" in refusal(stranger.token(GOOD, **header))
        verify(ES.token(GOOD, **header))
    assert "does not have" in refusal(Signer("unknown").token(GOOD, jwk=stranger.jwk()))


def test_extensions_and_other_types_are_refused() -> None:
    for header in ({"crit": ["exp"]}, {"crit": []}, {"b64": False}, {"b64": True}):
        head = segment({"alg": "ES256", "kid": "ES256", **header})
        assert "extensions" in refusal(f"{head}.{segment(GOOD)}.AAAA")
    for kind in ("logout+jwt", "dpop+jwt", "JWE", " "):
        assert "another type" in refusal(ES.token(GOOD, typ=kind))
    for kind in ("JWT", "at+jwt", "AT+JWT", "application/at+jwt"):
        verify(ES.token(GOOD, typ=kind))


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        (without(iss="https://id.example/"), "another issuer"),
        (without("iss"), "lacks"),
        (without(aud="topwor"), "another audience"),
        (without(aud=[]), "another audience"),
        (without("aud"), "lacks"),
        (without(aud={"topwork": 1}), "lacks"),
        (without("exp"), "lacks"),
        (without(exp=True), "lacks"),
        (without(exp=str(int(NOW + 300))), "lacks"),
        (without(exp=None), "lacks"),
        (without(exp=NOW - 30), "expired"),
        (without(nbf=NOW + 31), "not come"),
        (without(iat=NOW + 31), "not come"),
        (without("sub"), "lacks"),
        (without(sub=""), "subject"),
        (without(sub="a\0b"), "subject"),
        (without(sub="a\nb"), "subject"),
        (without(sub="a" * 256), "subject"),
        (without(sub=7), "lacks"),
    ],
)
def test_a_token_that_is_signed_but_not_for_us_now_is_refused(
    claims: dict[str, Any], reason: str
) -> None:
    # PyJWT would not sign some of these.
    head = segment({"alg": "ES256", "kid": "ES256"})
    signed = f"{head}.{segment(claims)}"
    signature = jwt.algorithms.ECAlgorithm(jwt.algorithms.ECAlgorithm.SHA256).sign(
        signed.encode(), ES.private
    )
    assert reason in refusal(f"{signed}.{segment(signature)}")


def test_clocks_may_differ_by_the_leeway_and_no_more() -> None:
    token = ES.token(GOOD | {"nbf": NOW, "exp": NOW + 300})
    assert "not come" in refusal(token, now=NOW - 30.5)
    verify(token, now=NOW - 30)
    verify(token, now=NOW + 329.5)
    assert "expired" in refusal(token, now=NOW + 330)


@pytest.mark.parametrize("payload", [b"NaN", b"[]", b"{", b"\xff", b"[" * 5000, b'{"exp": NaN}'])
def test_a_signed_payload_that_is_no_claims_is_refused(payload: bytes) -> None:
    token = jwt.PyJWS().encode(payload, ES.private, "ES256", headers={"kid": "ES256"})
    assert "lacks" in refusal(token)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[" * 5000,
        b'{"alg": "ES256", "kid": ' + b"[" * 5000,
        b'{"alg": 1}',
        b'{"alg": "ES256", "kid": 1}',
        b'{"kid": "ES256"}',
        b"\xff\xfe",
        b"{}",
        b'"ES256"',
    ],
)
def test_a_header_that_cannot_be_read_is_refused(header: bytes) -> None:
    assert refusal(f"{segment(header)}.{segment(GOOD)}.AAAA")


def test_a_huge_token_is_refused_by_its_length_alone() -> None:
    token = ES.token(GOOD)
    assert "characters" in refusal(token + "A" * MAX_TOKEN)
    assert "characters" in refusal("." * (MAX_TOKEN + 1))
    assert "characters" in refusal("eyJ" * 1_000_000)


@pytest.mark.parametrize("mark", ["\0", " ", "\n", "=", "+", "/", "é", "\udcff", "..", "A"])
def test_a_mark_that_no_token_has_is_refused_wherever_it_stands(mark: str) -> None:
    token = ES.token(GOOD)
    for place in (0, 5, len(token) // 2, len(token)):
        if mark != "A" or place < len(token):
            refusal(token[:place] + mark + token[place:])


def test_a_token_without_a_key_id_is_taken_if_there_is_no_choice() -> None:
    nameless, other = Signer(None), Signer("other")
    token = nameless.token(GOOD)
    assert verify(token, KeySet(parse_key_set(key_set(nameless, RS)))).subject == "user-7"
    assert "does not have" in refusal(token, KeySet(parse_key_set(key_set(nameless, other))))


@given(st.text(max_size=200) | st.binary(max_size=200).map(segment))
def test_whatever_is_sent_is_refused_as_a_token(text: str) -> None:
    refusal(text)
    refusal(f"{segment({'alg': 'ES256', 'kid': 'ES256'})}.{text}.{text}")
