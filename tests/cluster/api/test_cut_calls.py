"""Clients that go at random moments, over an engine with fake ranks: what they held is back."""

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.api.real_engine import RealEngine
from tests.cluster.conftest import Serving
from tests.end_to_end.asking import wait_for
from tests.end_to_end.cuts import carry_out, cuts
from tests.patience import PATIENCE

NUM_CUTS = 120
GOLDEN = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "seed": 1}
NONE_AT_REST = ("requests_running", "requests_waiting", "router_inflight", "kv_blocks_held")


def test_what_clients_held_that_went_at_random_moments_is_back(
    serve: Callable[..., Serving], engine: RealEngine, model_dir: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(model_dir, tmp_path / "model")
    (directory / "config.json").write_text('{"hidden_size": 3}')
    serving = serve(
        cast(FakeScheduler, engine),
        model_dir=str(directory),
        stream_keep=0.1,
        response_keep=0.1,
    )
    port = urlsplit(serving.url).port
    assert port is not None

    def get(path: str) -> httpx.Response:
        return httpx.get(serving.url + path, timeout=PATIENCE)

    def golden() -> object:
        reply = httpx.post(f"{serving.url}/v1/completions", json=GOLDEN, timeout=PATIENCE)
        return reply.raise_for_status().json()["choices"]

    def metric(name: str) -> float:
        found = re.findall(rf"(?m)^topwork_{name}(?:{{.*}})? (\S+)$", get("/metrics").text)
        return sum(map(float, found))

    expected = golden()
    with ThreadPoolExecutor(6) as threads:
        some = islice(
            cuts(1, ["tiny"], b"\x08" + bytes(7) + b"{}      " + bytes(50_000), 150), NUM_CUTS
        )
        told = list(threads.map(lambda cut: carry_out(cut, port, PATIENCE), some))
    assert not [one for one in told if one.startswith("HTTP/1.1 500")]
    assert sum(one.startswith("HTTP/1.1 200") for one in told) > NUM_CUTS / 10
    wait_for(lambda: not any(map(metric, NONE_AT_REST)))
    # What is not told of in time ends by itself, so that it is back all the same.
    assert metric("client_disconnects_total") > NUM_CUTS / 10
    assert metric("kv_blocks_free") + metric("kv_blocks_cached") == metric("kv_blocks") > 0
    assert serving.backend.uploads == {}
    kept = {
        *(f"/v1/streams/{one}" for one in re.findall(r"(?i)x-stream-id: (\S+)", "".join(told))),
        *(f"/v1/responses/{one}" for one in re.findall(r'"id":"(resp_\w+)"', "".join(told))),
    }
    assert len({path[:12] for path in kept}) == 2
    wait_for(lambda: all(get(path).status_code == 404 for path in kept))
    assert golden() == expected
