"""A thousand clients that go at random moments: what they held is back, and no answer differs."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.cuts import carry_out, cuts
from tests.end_to_end.server import MODELS, Server, adapter_dirs
from tests.patience import PATIENCE

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]
NUM_CUTS = int(os.environ.get("CUTS", "1000"))
SEED = int(os.environ.get("SEED", "1"))
AT_ONCE = 8
GOLDEN_EVERY = 100
NONE_AT_REST = (
    "topwork_requests_running",
    "topwork_requests_waiting",
    "topwork_requests_waiting_for_adapter",
    "topwork_router_inflight",
    "topwork_kv_blocks_held",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    running = Server(log, "--tp", "1", "--stream-keep", "2", "--response-keep", "2")
    running.wait_until_ready()
    yield running
    running.stop()


def golden(server: Server) -> list[Any]:
    """Return what base and adapters answer, whatever else is asked."""
    asked = {"max_tokens": 10, "temperature": 0, "logprobs": True, "return_token_ids": True}
    answers = [server.chat(model, "Name three colours.", **asked) for model in MODELS[:3]]
    return [answer["choices"] for answer in answers]


def test_what_clients_held_that_went_at_random_moments_is_back(server: Server) -> None:
    expected = golden(server)
    registered = server.metric("topwork_adapters_registered")
    adapter = next(iter(adapter_dirs().values()))
    drawn = cuts(SEED, MODELS, (adapter / "adapter_model.safetensors").read_bytes())
    streams: set[str] = set()
    kinds: Counter[str] = Counter()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for _ in range(0, NUM_CUTS, GOLDEN_EVERY):
            some = list(islice(drawn, GOLDEN_EVERY))
            kinds.update(cut.kind for cut in some)
            for told in threads.map(lambda cut: carry_out(cut, server.port, PATIENCE), some):
                streams.update(re.findall(r"(?i)x-stream-id: (\S+)", told))
                streams.update(re.findall(r'"id":"(resp_\w+)"', told))
                assert not re.match(r"HTTP/1.1 500", told), told[:500]
            assert golden(server) == expected
    assert len(kinds) == 11, kinds

    def at_rest() -> dict[str, float]:
        return {name: server.metric(name) for name in NONE_AT_REST}

    wait_for(lambda: not any(at_rest().values()), at_rest)
    # What is not told of in time ends by itself, so that it is back all the same.
    assert server.metric("topwork_client_disconnects_total") > NUM_CUTS / 5
    blocks, free, cached = (
        server.metric(f"topwork_kv_blocks{which}") for which in ("", "_free", "_cached")
    )
    assert free + cached == blocks
    assert server.metric("topwork_tp_group_restarts_total") == 0
    entries = server.get("/v1/adapters").json()["data"]
    assert [entry["name"] for entry in entries if entry["leases"]] == []
    assert not any(slot["loading"] for entry in entries for slot in entry["slots"])

    def uploads() -> list[str]:
        """Unload what was whole before its client went; return what is left."""
        names = [entry["name"] for entry in server.get("/v1/adapters").json()["data"]]
        for name in names:
            if name.startswith("cut-"):
                server.post("/v1/unload_lora_adapter", {"lora_name": name})
        return names if server.metric("topwork_adapters_registered") != registered else []

    wait_for(lambda: not uploads(), uploads)
    assert streams, "none could be read on"

    def kept() -> list[str]:
        paths = [f"/v1/{'responses' if one[:5] == 'resp_' else 'streams'}/{one}" for one in streams]
        return [path for path in paths if server.get(path).status_code != 404]

    wait_for(lambda: not kept(), kept)
    assert golden(server) == expected
