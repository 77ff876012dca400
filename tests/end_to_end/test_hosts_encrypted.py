"""With TLS between hosts, the wires tell nothing and a stranger is answered by nobody.

The same capture without TLS does find what it looks for, so that it would be found.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import yaml

from tests.end_to_end.asking import wait_for
from tests.end_to_end.hosts.capture import Capture, Stream, captured
from tests.end_to_end.hosts.host import why_there_can_be_none
from tests.end_to_end.hosts.network import Network
from tests.end_to_end.hosts.ray_hosts import HEAD, PORT, RANK, TOKEN, RayHosts
from tests.end_to_end.hosts.strangers import (
    Listener,
    answer_to_plain_words,
    answer_without_a_certificate,
    listeners,
)
from tests.patience import PATIENCE

LACKING = why_there_can_be_none()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.ray,
    pytest.mark.skipif(LACKING is not None, reason=f"no hosts: {LACKING}"),
]

KEY = "a-key-that-nobody-may-read-on-the-way"
MARKER = "The quince harvest of Vexbury was counted in 7351 wicker baskets"
TLS_HANDSHAKE = (22, 3)  # how each side of TLS begins
SSH, ASKED = 22, PORT  # the hosts' own, and where clients ask
ARGUMENTS: dict[str, Any] = {
    "anonymous": False,
    "api_key_file": "/shared/keys.yaml",
    "tp": 2,
    "max_num_seqs": 4,
    "threads_per_rank": 1,
    "kv_cache_memory": "64MiB",
    "host_adapter_memory": "64MiB",
    "routers": 1,
}
# What Ray shows on its own ports, without TLS, and cannot be told to leave; docs/operations.md has
# them. None tells a stranger more than that he has no token.
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


@contextmanager
def cluster(directory: Path, *, is_encrypted: bool) -> Iterator[RayHosts]:
    """A head that only passes calls on, two hosts that share the ranks, and a stranger."""
    with Network(directory, (HEAD, "one", "two", "stranger")) as network:
        network.start("stranger")
        running = RayHosts(network, is_encrypted=is_encrypted)
        for name in ("one", "two"):
            running.join(name, 2)
        keys = [{"key": KEY, "tenant": "test", "adapters": "*", "admin": True}]
        (network.shared / "keys.yaml").write_text(yaml.safe_dump(keys))
        with network.seen_from(HEAD):
            running.url = f"http://127.0.0.1:{PORT}"
            running.deploy(**ARGUMENTS)
            wait_for(running.is_ready, running.logs)
            assert len(set(running.hosts_of(RANK))) == 2, "ranks must sum over the wire"
            yield running


def ask(running: RayHosts) -> tuple[list[int], str]:
    """Send the marker from the head itself; return its token ids and the answer."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=running.url, headers=headers, timeout=PATIENCE) as client:
        told = client.post("/tokenize", json={"model": "smollm2", "prompt": MARKER})
        assert told.status_code == 200, told.text
        body = {"model": "smollm2", "prompt": MARKER, "max_tokens": 24, "temperature": 0}
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        streamed = client.post("/v1/completions", json=body | {"stream": True})
        assert "[DONE]" in streamed.text
    return told.json()["tokens"], reply.json()["choices"][0]["text"]


def spellings(token_ids: list[int], answer: str) -> dict[str, bytes]:
    """Return all that must not be read on the way, by what it is."""
    ids = np.array(token_ids)
    # Without the header of the list: they may be part of a longer one.
    packed = b"".join(msgspec.msgpack.encode(token) for token in token_ids)
    return {
        "the prompt": MARKER.encode(),
        "the prompt in UTF-16": MARKER.encode("utf-16-le"),
        "the prompt's ids, four bytes each": ids.astype("<i4").tobytes(),
        "the prompt's ids, eight bytes each": ids.astype("<i8").tobytes(),
        "the prompt's ids in msgpack": packed,
        "the prompt's ids in JSON": json.dumps(token_ids).strip("[]").encode(),
        "the answer": json.dumps(answer).strip('"').encode(),
        "the key": KEY.encode(),
        "Ray's token": TOKEN.encode(),
    }


def found_in(capture: Capture, streams: list[Stream], wanted: dict[str, bytes]) -> set[str]:
    """Return what of it is in a stream, or in a single frame."""
    said = [stream.data for stream in streams] + list(capture.frames)
    return {what for what, spelt in wanted.items() if any(spelt in data for data in said)}


def begins_in_clear(stream: Stream) -> bool:
    """Tell whether a stream between hosts, but sshd's and the stranger's, begins without TLS."""
    is_ours = SSH not in (stream.flow[1], stream.flow[3])
    return is_ours and stream.has_begin and tuple(stream.data[:2]) != TLS_HANDSHAKE


def test_without_tls_a_capture_finds_prompt_answer_and_keys(tmp_path: Path) -> None:
    with cluster(tmp_path, is_encrypted=False) as running:
        with captured(running.network) as capture:
            wanted = spellings(*ask(running))
        found = found_in(capture, capture.streams(), wanted)
    assert found >= {"the prompt", "the prompt's ids in msgpack", "the answer", "the key"}


def test_with_tls_the_wires_tell_nothing_and_a_stranger_is_answered_by_nobody(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, is_encrypted=True) as running:
        with captured(running.network) as capture:
            wanted = spellings(*ask(running))
            # What begins while it is looked at: a new router's connections, and a rank's.
            (host,) = {running.hosts_of(RANK)[0]}
            running.network.hosts[host].run("pkill", "-9", "-f", "^ray::WorkerActor")
            wait_for(lambda: len(running.hosts_of(RANK)) < 2 or not running.is_ready())
            wait_for(running.is_ready, running.logs)
            assert spellings(*ask(running)) == wanted
        streams = capture.streams()
        assert found_in(capture, streams, wanted) == set()
        assert [stream.flow for stream in streams if begins_in_clear(stream)] == []
        assert any(stream.has_begin for stream in streams), "no connection began meanwhile"
        open_to_all = [
            listener
            for name in (HEAD, "one", "two")
            for listener in listeners(running.network.hosts[name])
            if listener.port not in (SSH, ASKED)
        ]
        with running.network.seen_from("stranger"):
            answers = [one for one in open_to_all if answered(one)]
    print("\n".join(f"{one.host}:{one.port} {one.program[:120]}" for one in open_to_all))
    assert len(open_to_all) > 10, "Ray, schedulers, ranks and routers listen"
    assert [one for one in answers if not any(own in one.program for own in RAYS_OWN)] == []


def answered(listener: Listener) -> bool:
    """Tell whether a stranger hears anything from a socket; of Ray's own ports, its status."""
    return bool(answer_to_plain_words(listener) or answer_without_a_certificate(listener))
