"""Uploads of adapters over HTTP, plain and as SGLang's trainers send them, with fake schedulers."""

import base64
import json
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster.adapters.records import LoadOptions
from cluster.api.routes.admin import uploads
from cluster.router.testing.fake_scheduler import FakeScheduler
from cluster.router.uploads import PIECE_BYTES
from tests.patience import PATIENCE

WEIGHTS = b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "  # as a safetensors file begins
ENCODED = base64.b64encode(WEIGHTS).decode()


@pytest.fixture
def serving(serve: Callable[..., Any]) -> Any:
    """Return a server without adapters."""
    return serve(FakeScheduler())


def put(serving: Any, name: str, content: Any = WEIGHTS, **more: Any) -> httpx.Response:
    return httpx.put(f"{serving.url}/v1/adapters/{name}", content=content, **more)


def post_tensors(serving: Any, **body: Any) -> httpx.Response:
    body = {"lora_name": "law", "config_dict": {"r": 8}, "serialized_tensors": ENCODED} | body
    return httpx.post(f"{serving.url}/load_lora_adapter_from_tensors", json=body)


def refused(reply: httpx.Response, reason: str, status: int = 400) -> None:
    assert reply.status_code == status, reply.text
    assert reason in reply.json()["error"]["message"]


def refused_as_sglang(reply: httpx.Response, reason: str, status: int = 400) -> None:
    assert reply.status_code == status, reply.text
    assert reply.json()["success"] is False
    assert reason in reply.json()["error_message"]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_upload_answers_with_what_the_name_stands_for_and_is_used(serving: Any) -> None:
    reply = put(serving, "my-org/law")
    assert (reply.status_code, reply.json()["version"]) == (200, 1)
    assert reply.json() == httpx.get(f"{serving.url}/v1/adapters/my-org/law").json()
    serving.client().completions.create(model="my-org/law", prompt=[5], max_tokens=1)
    assert serving.schedulers[0].submitted[0].adapter == reply.json()["digest"]


def test_header_and_query_say_what_load_says_in_its_body(serving: Any) -> None:
    config = '{"r": 8, "base_model_name_or_path": "/größe"}'
    checksum = "ab" * 32
    url = f"law?load_inplace=true&pinned=1&sha256={checksum}"
    assert put(serving, url, headers={"X-Adapter-Config": config.encode()}).status_code == 200
    options = LoadOptions(True, True, checksum)
    assert serving.backend.upload_calls == [("law", config.encode(), options)]
    assert put(serving, "law?load_inplace=true", WEIGHTS + b"2").json()["version"] == 2
    refused(put(serving, "law"), "already been loaded")


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("load_inplace=maybe", "must be true or false"),
        ("sha256=abc", "64 hex digits"),
        ("inplace=true", "is not known"),
    ],
)
def test_a_query_that_cannot_be_understood_is_refused(
    serving: Any, query: str, reason: str
) -> None:
    refused(put(serving, f"law?{query}"), reason)
    assert serving.backend.uploads == {}


def test_the_base_models_name_cannot_be_uploaded_to(serving: Any) -> None:
    base = httpx.get(f"{serving.url}/v1/models").json()["data"][0]["id"]
    refused(put(serving, base), "name of the base model")
    refused_as_sglang(post_tensors(serving, lora_name=base), "name of the base model")


def test_a_large_body_goes_to_the_pool_in_bounded_pieces(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    take = serving.backend.upload_piece

    async def upload_piece(upload: str, offset: int, data: bytes) -> None:
        sizes.append(len(data))
        await take(upload, offset, data)

    monkeypatch.setattr(serving.backend, "upload_piece", upload_piece)

    def body() -> Iterator[bytes]:  # chunked: no length is announced
        yield WEIGHTS
        for _ in range(40):
            yield bytes(200_000)

    assert put(serving, "law", body()).status_code == 200
    assert sum(sizes) == len(WEIGHTS) + 40 * 200_000
    assert max(sizes) < 2 * PIECE_BYTES


def test_a_failed_upload_and_one_whose_client_goes_away_leave_nothing(serving: Any) -> None:
    refused(put(serving, "law", b"broken"), "damaged")
    assert (serving.backend.uploads, serving.backend.aborted) == ({}, ["law"])
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"PUT /v1/adapters/art HTTP/1.1\r\nHost: a\r\n")
        connection.sendall(b"Content-Length: 100\r\n\r\nhalf")
        wait_until(lambda: "art" in serving.backend.uploads)
    wait_until(lambda: serving.backend.aborted == ["law", "art"])
    assert serving.backend.uploads == {}


def test_tensors_as_sglang_spells_them_become_a_version(serving: Any) -> None:
    reply = post_tensors(serving, pinned=True, added_tokens_config=None, lora_id=None)
    assert reply.status_code == 200, reply.text
    assert reply.json()["success"] is True
    assert reply.json()["loaded_adapters"].keys() == {"law"}
    ((name, config, options),) = serving.backend.upload_calls
    assert (name, json.loads(config), options) == ("law", {"r": 8}, LoadOptions(False, True))
    refused_as_sglang(post_tensors(serving), "already been loaded")
    again = {"serialized_tensors": None, "serialized_named_tensors": [ENCODED] * 2}
    assert post_tensors(serving, load_inplace=True, **again).status_code == 200


def test_tensors_may_be_a_file_in_the_shared_memory_of_the_pools_host(serving: Any) -> None:
    reply = post_tensors(serving, serialized_tensors="/dev/shm/step-1.safetensors")
    assert reply.json()["loaded_adapters"] == {"law": "/dev/shm/step-1.safetensors"}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"serialized_tensors": encoded(pickle.dumps([1]))}, "pickle, which can run code"),
        ({"serialized_tensors": encoded(pickle.dumps([1], 2))}, "pickle, which can run code"),
        ({"serialized_tensors": encoded(b"PK\x03\x04 as torch.save")}, "pickle"),
        ({"serialized_tensors": "/etc/passwd"}, "/dev/shm"),
        ({"serialized_tensors": "no base64!"}, "not base64"),
        ({"serialized_tensors": "größe"}, "not base64"),
        ({"serialized_tensors": None}, "one text is wanted"),
        ({"serialized_named_tensors": [ENCODED, "AAAA"]}, "one text is wanted"),
        ({"load_format": "flattened_bucket"}, "load_format"),
        ({"config_dict": [1]}, "config_dict"),
        ({"config_dict": None}, "config_dict"),
    ],
)
def test_what_is_no_safetensors_file_is_refused_with_the_reason(
    serving: Any, body: dict[str, Any], reason: str
) -> None:
    refused_as_sglang(post_tensors(serving, **body), reason)
    assert serving.backend.uploads == {}
    assert httpx.get(f"{serving.url}/v1/adapters").json()["data"] == []


@pytest.mark.parametrize(
    "config",
    [
        '{"r": 1' + "0" * 400 + "}",
        '{"r": NaN}',
        '{"r": "\\ud800"}',
        "[" * 5000 + "]" * 5000,
        '{"r": [' + "1," * 200_000 + "1]}",
    ],
)
def test_a_hostile_configuration_is_no_fault_of_the_server(serving: Any, config: str) -> None:
    text = f'{{"lora_name": "law", "config_dict": {config}, "serialized_tensors": "{ENCODED}"}}'
    reply = httpx.post(f"{serving.url}/load_lora_adapter_from_tensors", content=text)
    assert reply.status_code in (200, 400), reply.text
    assert serving.backend.uploads == {}


@pytest.mark.parametrize("length", [b"99999999999999999999", b"-1", b"1e9", b"\xff"])
def test_a_length_that_is_none_is_not_believed(serving: Any, length: bytes) -> None:
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(PATIENCE)
        head = b"PUT /v1/adapters/law HTTP/1.1\r\nHost: a\r\nContent-Length: %s\r\n\r\nhalf"
        connection.sendall(head % length)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1000)
    wait_until(lambda: serving.backend.uploads == {})
    assert put(serving, "law").status_code == 200


def test_tensors_that_are_too_large_for_one_body_are_told_where_to_go(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_TENSORS_BODY", 1000)
    refused_as_sglang(post_tensors(serving, serialized_tensors="A" * 1000), "PUT /v1/adapters")


def test_only_admins_may_upload(serve: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "keys").write_text('[{"key": "some-tenant", "tenant": "t", "adapters": "*"}]')
    serving = serve(FakeScheduler(), api_key_file=str(tmp_path / "keys"))
    headers = {"Authorization": "Bearer some-tenant"}
    assert put(serving, "law", headers=headers).status_code == 403
    assert put(serving, "law").status_code == 401
    url = f"{serving.url}/load_lora_adapter_from_tensors"
    assert httpx.post(url, json={}, headers=headers).status_code == 403
    assert serving.backend.uploads == {}
