"""The key set of an issuer that rotates its keys, says nonsense, and goes away."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.router.tenancy.oidc import issuer_keys
from cluster.router.tenancy.oidc.issuer_keys import SPACING, IssuerKeys
from cluster.router.tenancy.oidc.key_set import MAX_BYTES
from tests.cluster.router.tenancy.oidc.issuer import Issuer, Signer, key_set
from tests.patience import PATIENCE

ONE, TWO = Signer("one"), Signer("two")


class Watched(IssuerKeys):
    """The keys of an issuer, by a clock that stands, and how often they could not be had."""

    def __init__(self, issuer: str, jwks: str | None = None) -> None:
        self.now = 1000.0
        self.num_failures = self.num_changes = 0
        super().__init__(issuer, jwks, self._count, lambda: self.now)
        self.note_changes(self._count_change)

    async def fetch(self) -> None:
        await self._begin()

    def has(self, signer: Signer) -> bool:
        return self.current is not None and self.current.get(signer.kid, "ES256") is not None

    def _count(self) -> None:
        self.num_failures += 1

    def _count_change(self) -> None:
        self.num_changes += 1


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer(ONE)
    yield issuer
    issuer.leave()


async def test_keys_are_found_by_the_discovery_document(issuer: Issuer) -> None:
    keys = Watched(issuer.url)
    await keys.fetch()
    assert keys.has(ONE) and not keys.has(TWO)
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]
    await keys.fetch()
    assert (keys.num_changes, keys.num_failures) == (1, 0)


async def test_keys_may_be_at_another_address_or_in_a_file(issuer: Issuer, tmp_path: Path) -> None:
    keys = Watched("https://id.example", f"{issuer.url}/keys")
    await keys.fetch()
    assert keys.has(ONE) and issuer.asked == ["/keys"]
    file = tmp_path / "keys.json"
    file.write_bytes(key_set(TWO))
    keys = Watched("https://id.example", str(file))
    await keys.fetch()
    assert keys.has(TWO)
    file.unlink()
    await keys.fetch()
    assert keys.has(TWO) and keys.num_failures == 1


async def test_a_key_that_is_not_known_is_looked_for_once_a_minute(issuer: Issuer) -> None:
    keys = Watched(issuer.url)
    await keys.fetch()
    issuer.rotate(TWO)
    await asyncio.gather(*(keys.search() for _ in range(50)))
    assert keys.has(TWO) and not keys.has(ONE) and issuer.num_fetches == 2
    keys.now += SPACING - 0.1
    await keys.search()
    assert issuer.num_fetches == 2
    keys.now += 0.1
    await keys.search()
    assert issuer.num_fetches == 3


async def test_keys_stay_while_the_issuer_is_away(
    issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Watched(issuer.url)
    await keys.fetch()
    issuer.leave()
    with caplog.at_level(logging.INFO, "topwork.router"):
        for _ in range(3):
            await keys.fetch()
        assert keys.has(ONE) and keys.num_failures == 3
        issuer.come_back()
        issuer.rotate(TWO)
        await keys.fetch()
    assert keys.has(TWO)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "those that were had before stay" in caplog.records[0].message


@pytest.mark.parametrize(
    ("path", "status", "body", "reason"),
    [
        ("/keys", 500, b"", "answers 500"),
        ("/keys", 302, b"", "answers 302"),
        ("/keys", 200, b"<html>", "no JSON Web Key Set"),
        ("/keys", 200, b'{"keys": []}', "none of its 0 keys"),
        ("/keys", 200, b" " * (MAX_BYTES + 1), "more than"),
        ("/.well-known/openid-configuration", 404, b"", "answers 404"),
        ("/.well-known/openid-configuration", 200, b"{}", "no discovery document"),
        (
            "/.well-known/openid-configuration",
            200,
            b'{"issuer": "https://other.example", "jwks_uri": "https://other.example/k"}',
            "is of the issuer",
        ),
    ],
)
async def test_what_is_no_key_set_leaves_the_keys_as_they_were(
    issuer: Issuer,
    caplog: pytest.LogCaptureFixture,
    path: str,
    status: int,
    body: bytes,
    reason: str,
) -> None:
    keys = Watched(issuer.url)
    await keys.fetch()
    issuer.answers[path] = (status, body)
    await keys.fetch()
    assert keys.has(ONE) and keys.num_failures == 1
    assert reason in caplog.records[-1].message and caplog.records[-1].message.isprintable()


@pytest.mark.parametrize("uri", ["http://id.example/keys", "file:///etc/passwd", "ftp://x/", ""])
async def test_keys_are_fetched_over_no_address_where_others_could_change_them(
    issuer: Issuer, uri: str
) -> None:
    discovery = json.dumps({"issuer": issuer.url, "jwks_uri": uri}).encode()
    issuer.answers["/.well-known/openid-configuration"] = (200, discovery)
    keys = Watched(issuer.url)
    await keys.fetch()
    assert keys.current is None and keys.num_failures == 1 and issuer.num_fetches == 0


async def test_an_issuer_that_does_not_answer_holds_no_call_up_for_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_left = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        has_left.set()

    monkeypatch.setattr(issuer_keys, "FETCH_SECONDS", 0.3)
    monkeypatch.setattr(issuer_keys, "WAIT_SECONDS", 0.05)
    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        keys = Watched(f"http://127.0.0.1:{port}")
        await keys.search()
        assert keys.num_failures == 0  # it goes on without the call
        deadline = time.monotonic() + PATIENCE
        while not keys.num_failures and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert keys.num_failures == 1 and keys.current is None
        await asyncio.wait_for(has_left.wait(), PATIENCE)


async def test_in_the_background_it_is_fetched_again_sooner_after_a_failure(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer_keys, "RETRY_INTERVAL", 0.01)
    good = issuer.answers.pop("/keys")
    keys = Watched(issuer.url)
    running = asyncio.create_task(keys.run())
    deadline = time.monotonic() + PATIENCE
    while keys.num_failures < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    issuer.answers["/keys"] = good
    while keys.current is None and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert keys.has(ONE)
