"""Two thousand requests through a server: everything is given back, and memory stays flat."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import resident_bytes
from tests.end_to_end.server import Server, adapter_dirs

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]
NUM_REQUESTS = 2000


def test_two_thousand_requests_leave_nothing_behind(tmp_path: Path) -> None:
    server = Server(tmp_path / "log.txt", "--tp", "2", "--kv-cache-memory", "64MiB")
    try:
        server.wait_until_ready()
        serve_and_compare(server)
    finally:
        server.stop()


def serve_and_compare(server: Server) -> None:
    models = itertools.cycle(["smollm2", *adapter_dirs()])
    source = random.Random(5)
    bodies = [
        {
            "model": next(models),
            "prompt": [source.randrange(100, 49000) for _ in range(source.randrange(1, 60))],
            "max_tokens": source.randrange(1, 12),
            "temperature": source.choice([0, 1]),
            "seed": index,
            "stream": index % 3 == 0,
        }
        for index in range(NUM_REQUESTS)
    ]

    def ask(body: dict[str, object]) -> int:
        return server.post("/v1/completions", body).status_code

    def memory() -> dict[int, int]:
        return {pid: resident_bytes({pid}) for pid in server.processes()}

    with ThreadPoolExecutor(16) as clients:
        assert set(clients.map(ask, bodies[:600])) == {200}
        before = memory()
        assert set(clients.map(ask, bodies[600:])) == {200}
    wait_for(lambda: server.metric("topwork_requests_running") == 0)
    after = memory()
    metrics = server.metrics()

    def pages(state: str) -> float:
        return sum(v for k, v in metrics.items() if k.startswith(f"topwork_kv_blocks{state}{{"))

    assert pages("_held") == 0
    assert pages("_free") + pages("_cached") == pages("")
    grown = {pid: after[pid] - before[pid] for pid in before if pid in after}
    assert max(grown.values()) < 32 * 2**20, f"a process grew: {grown}"
    budgets = [v for k, v in metrics.items() if k.startswith("topwork_rank_kv_bytes")]
    assert len(budgets) == 2 and max(budgets) <= 64 * 2**20
