"""Tokens as a router knows them: remembered until their end, while keys and rules change."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.errors import Forbidden, Unauthorized, Unavailable
from cluster.router.config import OidcConfig
from cluster.router.metrics.request_metrics import RouterMetrics
from cluster.router.tenancy.oidc import token_ring
from cluster.router.tenancy.oidc.key_set import KeySet
from cluster.router.tenancy.oidc.token_ring import TokenRing
from cluster.router.tenancy.oidc.verifier import TokenVerifier
from tests.cluster.router.tenancy.oidc.issuer import AUDIENCE, NOW, Issuer, Signer

ONE, TWO = Signer("one"), Signer("two")
RULES = "[{match: {scope: use}, tenant_claim: org}]"


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


class Ring(TokenRing):
    """A ring whose keys are fetched when a test says so."""

    def __init__(self, issuer: Issuer, path: Path) -> None:
        self.clock = Clock()
        self.metrics = RouterMetrics("tiny", 10)
        config = OidcConfig(issuer=issuer.url, audiences=(AUDIENCE,), rules_file=str(path))
        super().__init__(config, self.metrics, self.clock)

    def count(self, name: str) -> float:
        return dict(self.metrics.counts("r").counters[name])[()]


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer(ONE)
    yield issuer
    issuer.leave()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


@pytest.fixture
def ring(issuer: Issuer, path: Path) -> Ring:
    return Ring(issuer, path)


def token_of(issuer: Issuer, signer: Signer = ONE, **changes: object) -> str:
    return signer.token(issuer.claims(NOW, **{"scope": "use", "org": "acme", **changes}))


@pytest.fixture
def num_verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the tokens whose signatures were looked at."""
    tokens: list[str] = []
    verify = TokenVerifier.verify

    def noting(self: TokenVerifier, token: str, keys: KeySet, now: float) -> object:
        tokens.append(token)
        return verify(self, token, keys, now)

    monkeypatch.setattr(TokenVerifier, "verify", noting)
    return tokens


async def test_a_token_is_verified_once_and_remembered_until_its_end(
    ring: Ring, issuer: Issuer, num_verified: list[str]
) -> None:
    await ring.keys.search()
    token = token_of(issuer)
    assert ring.identify(token).tenant == "acme"
    ring.clock.now = NOW + 329
    assert ring.identify(token) is ring.identify(token)
    assert num_verified == [token] and ring.num_remembered == 1
    ring.clock.now = NOW + 330
    with pytest.raises(Unauthorized, match="expired"):
        ring.identify(token)
    assert ring.num_remembered == 0


async def test_before_the_issuers_keys_were_ever_had_nobody_can_tell(
    ring: Ring, issuer: Issuer
) -> None:
    with pytest.raises(Unavailable):
        ring.identify(token_of(issuer))
    with pytest.raises(Unauthorized):  # whatever the keys are
        ring.identify("a.b.c")
    assert ring.lacks_key_of(token_of(issuer)) and not ring.lacks_key_of("a.b.c")


async def test_a_token_of_a_key_that_the_issuer_has_withdrawn_is_forgotten(
    ring: Ring, issuer: Issuer
) -> None:
    await ring.keys.search()
    old, new = token_of(issuer), token_of(issuer, TWO)
    assert ring.identify(old).tenant == "acme"
    issuer.rotate(TWO)
    assert ring.lacks_key_of(new) and not ring.lacks_key_of(old)
    await ring.keys._begin()
    assert ring.identify(new).tenant == "acme"
    with pytest.raises(Unauthorized, match="does not have"):
        ring.identify(old)


async def test_changed_rules_count_for_tokens_that_are_remembered(
    ring: Ring, issuer: Issuer, path: Path
) -> None:
    await ring.keys.search()
    token = token_of(issuer)
    assert ring.identify(token).tenant == "acme"
    path.write_text("[{match: {scope: use}, tenant: all}]")
    for _ in range(2):
        await ring.rules.look()
    assert ring.identify(token).tenant == "all"
    path.write_text("[{match")
    for _ in range(3):
        await ring.rules.look()
    assert ring.identify(token).tenant == "all" and ring.count("token_rules_errors") == 2
    path.write_text("[]")
    for _ in range(2):
        await ring.rules.look()
    with pytest.raises(Forbidden, match="no rule"):
        ring.identify(token)


async def test_what_is_remembered_is_bounded_and_the_one_used_last_stays(
    ring: Ring, issuer: Issuer, num_verified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_ring, "MAX_REMEMBERED", 3)
    await ring.keys.search()
    tokens = [token_of(issuer, jti=str(number)) for number in range(6)]
    for token in tokens:
        ring.identify(tokens[0])
        ring.identify(token)
    assert ring.num_remembered == 3
    assert num_verified == tokens
    ring.identify(tokens[5])
    assert num_verified == tokens
    ring.identify(tokens[1])
    assert num_verified == [*tokens, tokens[1]]


async def test_what_is_refused_is_not_remembered(ring: Ring, issuer: Issuer) -> None:
    await ring.keys.search()
    forged = token_of(issuer, Signer("one"))
    for token in (forged, forged, "." * 20_000, "a.b.c"):
        with pytest.raises(Unauthorized):
            ring.identify(token)
    with pytest.raises(Forbidden):
        ring.identify(token_of(issuer, scope="other"))
    assert ring.num_remembered == 0


async def test_an_issuer_that_is_away_is_counted(ring: Ring, issuer: Issuer) -> None:
    issuer.answers.clear()
    await ring.keys.search()
    assert ring.count("issuer_keys_errors") == 1


def test_a_router_does_not_start_with_rules_that_cannot_be_used(
    issuer: Issuer, tmp_path: Path
) -> None:
    with pytest.raises(OSError):
        Ring(issuer, tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("[{tenant: a}]")
    with pytest.raises(ValueError, match="match"):
        Ring(issuer, tmp_path / "bad.yaml")
