"""Ranks that die or hang under load: clear answers, no hang, and serving again by itself."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.conftest import Server
from tests.end_to_end.reference import QUESTIONS
from tests.end_to_end.test_server import wait_for

pytestmark = [pytest.mark.model, pytest.mark.ray]
ANSWER_WITHIN = 10.0  # seconds, as documented


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("victim") / "log.txt", "--tp", "2")
    running.wait_until_ready()
    yield running
    family = running.processes()
    running.stop()
    assert not {pid for pid in family if Path(f"/proc/{pid}").exists()}


def resident_bytes(pids: set[int]) -> int:
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_requests_of_a_lost_rank_end_with_503_and_serving_goes_on(
    victim: Server, blow: signal.Signals
) -> None:
    victim.chat("smollm2", QUESTIONS[0], max_tokens=4)
    family, memory = victim.processes(), resident_bytes(victim.processes())
    ranks = victim.rank_pids()
    assert len(ranks) == 2

    def ask(index: int) -> tuple[int, str]:
        body = {"model": "smollm2", "prompt": f"{index}:", "max_tokens": 1500, "ignore_eos": True}
        reply = httpx.post(f"{victim.url}/v1/completions", json=body, timeout=60)
        return reply.status_code, reply.text

    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(ask, i) for i in range(8)]
        wait_for(lambda: victim.metric("topwork_requests_running") == 8)
        struck = time.monotonic()
        os.kill(ranks[0], blow)
        answers = [future.result() for future in asked]
    assert time.monotonic() - struck < ANSWER_WITHIN
    assert [status for status, _ in answers] == [503] * 8
    assert "ranks are down" in answers[0][1]
    wait_for(lambda: httpx.get(f"{victim.url}/health").status_code == 200, seconds=60)
    told = victim.chat("smollm2", QUESTIONS[0], max_tokens=8, temperature=0)
    assert "France" in told["choices"][0]["message"]["content"]
    assert not set(ranks) & set(victim.rank_pids())
    wait_for(lambda: len(victim.processes()) <= len(family) + 1, seconds=60)
    assert resident_bytes(victim.processes()) < 1.15 * memory


def test_health_tells_of_lost_ranks(victim: Server) -> None:
    os.kill(victim.rank_pids()[1], signal.SIGKILL)
    wait_for(lambda: httpx.get(f"{victim.url}/health").status_code == 503)
    wait_for(lambda: httpx.get(f"{victim.url}/health").status_code == 200, seconds=60)
    assert victim.metric("topwork_tp_group_restarts_total") >= 1
