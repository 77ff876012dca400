"""Tokens of an issuer in the headers of calls, beside keys and without them."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.config import OidcConfig
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.router.tenancy.oidc.issuer import AUDIENCE, Issuer, Signer, segment
from tests.patience import PATIENCE

ONE, TWO = Signer("one"), Signer("two")
RULES = """
- {match: {roles: trainer}, tenant_claim: org, scopes: [adapters:load], adapter_prefix: "{tenant}/"}
- {match: {roles: user}, tenant_claim: org}
"""
KEYS = "[{key: alice-secret, tenant: alice}, {key: dotted.secret.key, tenant: alice}]"


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer(ONE)
    yield issuer
    issuer.leave()


@pytest.fixture
def serving(serve: Callable[..., Any], issuer: Issuer, tmp_path: Path) -> Any:
    rules, keys = tmp_path / "rules.yaml", tmp_path / "keys.yaml"
    rules.write_text(RULES)
    keys.write_text(KEYS)
    oidc = OidcConfig(issuer=issuer.url, audiences=(AUDIENCE,), rules_file=str(rules))
    return serve(FakeScheduler(), api_key_file=str(keys), oidc=oidc)


def token_of(issuer: Issuer, signer: Signer = ONE, **changes: Any) -> str:
    claims = {"roles": ["user"], "org": "acme", **changes}
    return signer.token(issuer.claims(time.time(), **claims))


def models(serving: Any, token: str, header: str = "Authorization") -> httpx.Response:
    value = f"Bearer {token}" if header == "Authorization" else token
    return httpx.get(f"{serving.url}/v1/models", headers={header: value}, timeout=PATIENCE)


def test_tokens_and_keys_open_the_same_doors(serving: Any, issuer: Issuer) -> None:
    for header in ("Authorization", "X-Api-Key"):
        assert models(serving, token_of(issuer), header).status_code == 200
        assert models(serving, "alice-secret", header).status_code == 200
        assert models(serving, "dotted.secret.key", header).status_code == 200


def test_what_is_wrong_with_a_token_is_told_as_rfc_6750_has_it(
    serving: Any, issuer: Issuer
) -> None:
    payload = segment(issuer.claims(time.time(), roles=["user"], org="acme"))
    unsigned = f"{segment({'alg': 'none'})}.{payload}.AA"
    for token, reason in (
        (token_of(issuer, Signer("one")), "signature"),
        (token_of(issuer, exp=int(time.time()) - 60), "expired"),
        (token_of(issuer, aud="other"), "another audience"),
        (token_of(issuer, iss="https://id.example"), "another issuer"),
        (token_of(issuer, TWO), "does not have"),
        (unsigned, "algorithm"),
        ("a.b.c", "header"),
        ("." * 2, "no signed"),
        (f"{'A' * 20_000}.b.c", "characters"),
    ):
        reply = models(serving, token)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_token"), token
        assert reason in reply.json()["error"]["message"]
        challenge = reply.headers["WWW-Authenticate"]
        assert challenge.startswith('Bearer error="invalid_token", error_description="')
        assert reason in challenge and token not in reply.text
    reply = models(serving, token_of(issuer, roles=["guest"]))
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "insufficient_scope")
    assert reply.headers["WWW-Authenticate"].startswith('Bearer error="insufficient_scope", ')
    reply = models(serving, "unknown-secret")
    assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")


def test_a_call_with_a_token_of_a_new_key_waits_for_the_key(serving: Any, issuer: Issuer) -> None:
    assert models(serving, token_of(issuer)).status_code == 200
    num_fetches = issuer.num_fetches
    issuer.rotate(TWO)
    assert models(serving, token_of(issuer, TWO)).status_code == 200
    assert models(serving, token_of(issuer)).status_code == 401  # its key was withdrawn
    for _ in range(5):
        assert models(serving, token_of(issuer, Signer("three"))).status_code == 401
    assert issuer.num_fetches == num_fetches + 1


def test_tokens_are_taken_while_their_issuer_is_away(serving: Any, issuer: Issuer) -> None:
    assert models(serving, token_of(issuer)).status_code == 200
    issuer.leave()
    try:
        assert models(serving, token_of(issuer, sub="another")).status_code == 200
        assert models(serving, token_of(issuer, TWO)).status_code == 401
    finally:
        issuer.come_back()


def test_the_audit_log_tells_whose_token_it_was_and_not_the_token(
    serving: Any, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    token = token_of(issuer, roles=["trainer"])
    with caplog.at_level(logging.INFO):
        for name, status in (("acme/law", 200), ("other/law", 403)):
            reply = httpx.post(
                f"{serving.url}/v1/load_lora_adapter",
                json={"lora_name": name, "lora_path": "/a/1"},
                headers={"Authorization": f"Bearer {token}"},
                timeout=PATIENCE,
            )
            assert reply.status_code == status
    entries = [json.loads(r.message) for r in caplog.records if r.name == "topwork.audit"]
    for entry, status in zip(entries, (200, 403), strict=True):
        told = {name: entry.get(name) for name in ("tenant", "subject", "issuer", "key", "status")}
        assert told == {
            "tenant": "acme",
            "subject": "user-7",
            "issuer": issuer.url,
            "key": None,
            "status": status,
        }
    assert token not in caplog.text


def test_without_a_file_of_keys_tokens_alone_are_taken(
    serve: Callable[..., Any], issuer: Issuer, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    oidc = OidcConfig(issuer=issuer.url, audiences=(AUDIENCE,), rules_file=str(rules))
    serving = serve(FakeScheduler(), oidc=oidc)
    assert models(serving, token_of(issuer)).status_code == 200
    for token in ("alice-secret", "dotted.secret.key"):
        assert models(serving, token).status_code == 401
    assert httpx.get(f"{serving.url}/v1/models", timeout=PATIENCE).status_code == 401
    assert httpx.get(f"{serving.url}/health", timeout=PATIENCE).status_code == 200


def test_health_tells_a_token_without_rights_no_reasons(serving: Any, issuer: Issuer) -> None:
    for token in (token_of(issuer, roles=["guest"]), token_of(issuer, TWO), "a.b.c"):
        reply = httpx.get(
            f"{serving.url}/health", headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE
        )
        assert reply.status_code == 200
