"""Adapters that the pool fetches: from a host over TLS, a hub and a bucket, all on this machine."""

import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub.constants
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from cluster.adapters.sources import fetcher
from cluster.errors import InvalidAdapter, InvalidRequest, NotFound, Overloaded, Unavailable
from tests.cluster.adapters.service.pools import Make, digest_of
from tests.cluster.adapters.service.replicas import Replica
from tests.cluster.adapters.sources.hosts import COMMIT, Host, as_hub, certificate, serving
from tests.cluster.adapters.sources.uploading import files_of, staged

Start = Callable[..., Any]


@pytest.fixture
async def start(make: Make, tmp_path: Path) -> AsyncIterator[Start]:
    """Return a function that starts a pool which may fetch from some places."""

    async def begin(*sources: str, **more: Any) -> Any:
        replica = Replica()
        more = {"staging": str(tmp_path / "staged"), "load_gap": 0} | more
        actor = make(replica, sources=sources, **more)
        await actor.start({})
        await actor.attach(replica.address)
        return actor

    yield begin


@pytest.fixture
def host() -> Iterator[Host]:
    with serving() as host:
        yield host


async def test_an_adapter_comes_over_tls_from_a_host_that_is_allowed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with serving(context) as host:
        host.put("/a/law", *files_of(1))
        place = f"https://localhost:{host.port}/a"
        actor = await start(place)
        with pytest.raises(Unavailable, match="cannot be fetched"):  # an unknown authority
            await actor.load("law", f"{place}/law", False, False)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "one"))
        record = await actor.load("law", f"{place}/law", False, False)
    assert record.digest == digest_of(tmp_path, 1)
    assert staged(tmp_path / "staged") == {Path(record.path).name}
    assert "authorization" not in host.headers[-1]


async def test_a_checksum_is_of_the_weights(start: Start, host: Host) -> None:
    config, weights = files_of(1)
    host.put("/law", config, weights)
    place = f"http://127.0.0.1:{host.port}"
    actor = await start(place)
    with pytest.raises(InvalidAdapter, match="SHA-256"):
        await actor.load("law", f"{place}/law", False, False, "0" * 64)
    good = sha256(weights).hexdigest()
    assert (await actor.load("law", f"{place}/law", False, False, good)).version == 1
    with pytest.raises(InvalidRequest, match="sha256 is of"):
        await actor.load("art", "/some/directory", False, False, good)


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (404, NotFound, "there is no"),
        (403, InvalidRequest, "403"),
        (500, Unavailable, "500"),
        ((302, {"Location": "http://169.254.169.254/secret"}, b""), InvalidRequest, "redirects"),
        ((307, {"Location": "/elsewhere"}, b""), InvalidRequest, "redirects"),
        ((200, {"Content-Encoding": "gzip"}, b"\x1f\x8b"), InvalidRequest, "encoded"),
        ((200, {"Content-Length": "5000"}, b"half"), Unavailable, "cannot be fetched"),
        (b"\x80\x04K\x01.", InvalidAdapter, "do not hold a header"),
        (bytes(100_000), InvalidAdapter, "max_upload"),
    ],
)
async def test_what_a_host_answers_otherwise_leaves_the_old_version_and_no_files(
    start: Start, host: Host, tmp_path: Path, answer: Any, error: type[Exception], reason: str
) -> None:
    place = f"http://127.0.0.1:{host.port}"
    actor = await start(place, max_upload=50_000)
    host.put("/law", *files_of(1))
    before = await actor.load("law", f"{place}/law", False, False)
    host.answers["/law/adapter_model.safetensors"] = answer
    with pytest.raises(error, match=reason):
        await actor.load("law", f"{place}/law", True, False)
    assert await actor.record("law") == before
    await actor._staged.idle()
    assert staged(tmp_path / "staged") == {Path(before.path).name}
    assert host.asked[-1] == "/law/adapter_model.safetensors"  # and nowhere else


async def test_a_configuration_without_end_is_cut_off(start: Start, host: Host) -> None:
    place = f"http://127.0.0.1:{host.port}"
    actor = await start(place)
    host.put("/law", bytes(5 << 20), b"")
    with pytest.raises(InvalidAdapter, match="adapter_config.json takes over"):
        await actor.load("law", f"{place}/law", False, False)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "fe80::1",
        "::ffff:169.254.169.254",
        "fd00:ec2::254",
        "0.0.0.0",
        "224.0.0.1",
    ],
)
async def test_an_allowed_name_that_resolves_to_metadata_is_not_connected_to(
    start: Start, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80)),
        (family, socket.SOCK_STREAM, 6, "", (address, 80)),
    ]
    monkeypatch.setattr("cluster.adapters.sources.web.socket.getaddrinfo", lambda *_, **__: found)
    actor = await start("http://files.example.com")
    with pytest.raises(InvalidRequest, match="never asked"):
        await actor.load("law", "http://files.example.com/law", False, False)


async def test_nothing_is_fetched_that_is_not_allowed(start: Start, host: Host) -> None:
    host.put("/law", *files_of(1))
    actor = await start(f"http://127.0.0.1:{host.port}/other")
    for path in (f"http://127.0.0.1:{host.port}/law", "hf://my-org/law", "s3://bucket/law"):
        with pytest.raises(InvalidRequest, match="adapter_sources"):
            await actor.load("law", path, False, False)
    with pytest.raises(NotFound):  # a directory here
        await actor.load("law", "my-org/law", False, False)
    assert host.asked == []


async def test_a_host_that_drips_comes_to_an_end_and_only_so_many_are_waited_for(
    start: Start, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "FETCH_SECONDS", -1.0)
    place = f"http://127.0.0.1:{host.port}"
    host.put("/law", *files_of(1))
    actor = await start(place)
    with pytest.raises(Unavailable, match="has not come"):
        await actor.load("law", f"{place}/law", False, False)
    monkeypatch.setattr(fetcher, "MAX_FETCHES", 0)
    monkeypatch.setattr(fetcher, "MAX_WAITING", 0)
    with pytest.raises(Overloaded):
        await actor.load("law", f"{place}/law", False, False)


async def test_a_hubs_revision_is_resolved_to_a_commit_and_both_files_are_of_it(
    start: Start, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint(monkeypatch, f"http://127.0.0.1:{host.port}")
    config, weights = files_of(2)
    files = {"adapter_config.json": config, "adapter_model.safetensors": weights}
    as_hub(host, "my-org/law", "v1.0", files)
    actor = await start("hf://my-org")
    for path in ("hf://my-org/law@v1.0", "my-org/law@v1.0"):
        record = await actor.load("law", path, True, False)
        assert record.digest == digest_of(tmp_path / "scratch", 2)
    got = [path for path in host.asked if "/resolve/" in path]
    assert got and all(f"/resolve/{COMMIT}/" in path for path in got)
    for path, code in (("law/revision/v2.0", "RevisionNotFound"), ("other", "RepoNotFound")):
        host.answers[f"/api/models/my-org/{path}"] = (404, {"X-Error-Code": code}, b"")
    with pytest.raises(NotFound):
        await actor.load("law", "hf://my-org/law@v2.0", True, False)
    with pytest.raises(NotFound):
        await actor.load("law", "hf://my-org/other", True, False)
    assert (await actor.record("law")).digest == record.digest


async def test_a_hub_that_is_away_is_unavailable(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    endpoint(monkeypatch, f"http://127.0.0.1:{port}")
    actor = await start("hf://")
    with pytest.raises(Unavailable, match="cannot be fetched"):
        await actor.load("law", "hf://my-org/law", False, False)


def endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let huggingface_hub ask here; it has read HF_ENDPOINT when it was imported."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


class Bucket(MemoryFileSystem):
    """An s3 bucket in memory."""

    protocol = "s3"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]


async def test_an_adapter_comes_from_a_bucket(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_registry, "s3", Bucket)
    config, weights = files_of(3)
    bucket = fsspec.filesystem("s3")
    bucket.pipe("/bucket/adapters/law/adapter_config.json", config)
    actor = await start("s3://bucket/adapters")
    with pytest.raises(NotFound, match="adapter_model.safetensors"):
        await actor.load("law", "s3://bucket/adapters/law", False, False)
    bucket.pipe("/bucket/adapters/law/adapter_model.safetensors", weights)
    record = await actor.load("law", "s3://bucket/adapters/law", False, False)
    assert record.digest == digest_of(tmp_path, 3)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("no")

    monkeypatch.setattr(Bucket, "_open", refuse)
    with pytest.raises(InvalidRequest, match="may not read"):
        await actor.load("law", "s3://bucket/adapters/law", True, False)


async def test_a_bucket_without_its_package_says_what_to_install(start: Start) -> None:
    actor = await start("gs://bucket")
    with pytest.raises(InvalidRequest, match="gcsfs .*pip install 'topwork.gs.'"):
        await actor.load("law", "gs://bucket/law", False, False)
