"""Ranks that die or hang under load: clear answers, no hang, and serving again by itself."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.config import ServeConfig
from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import resident_bytes
from tests.end_to_end.reference import QUESTIONS
from tests.end_to_end.server import Server

pytestmark = [pytest.mark.model, pytest.mark.ray]


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("victim") / "log.txt", "--tp", "2")
    running.wait_until_ready()
    yield running
    family = running.processes()
    running.stop()
    assert not {pid for pid in family if Path(f"/proc/{pid}").exists()}


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_requests_of_a_lost_rank_end_with_503_and_serving_goes_on(
    victim: Server, blow: signal.Signals
) -> None:
    late = f"within {ServeConfig.model_fields['step_timeout'].default:g} s"
    victim.chat("smollm2", QUESTIONS[0], max_tokens=4)
    family, memory = victim.processes(), resident_bytes(victim.processes())
    ranks = victim.rank_pids()
    assert len(ranks) == 2

    def ask(index: int) -> tuple[int, str]:
        body = {"model": "smollm2", "prompt": f"{index}:", "max_tokens": 1500, "ignore_eos": True}
        reply = victim.post("/v1/completions", body)
        return reply.status_code, reply.text

    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(ask, i) for i in range(8)]
        wait_for(lambda: victim.metric("topwork_requests_running") == 8)
        os.kill(ranks[0], blow)
        answers = [future.result() for future in asked]
    assert [status for status, _ in answers] == [503] * 8
    for _, text in answers:
        assert "ranks are down" in text
        # One that is gone is missed at once; one that only does nothing when its time is over.
        assert (late in text) == (blow is signal.SIGSTOP)
    wait_for(victim.is_healthy)
    told = victim.chat("smollm2", QUESTIONS[0], max_tokens=8, temperature=0)
    assert "France" in told["choices"][0]["message"]["content"]
    assert not set(ranks) & set(victim.rank_pids())
    wait_for(lambda: len(victim.processes()) <= len(family) + 1)
    assert resident_bytes(victim.processes()) < 1.15 * memory


def test_health_tells_of_lost_ranks(victim: Server) -> None:
    os.kill(victim.rank_pids()[1], signal.SIGKILL)
    wait_for(lambda: victim.get("/health").status_code == 503)
    wait_for(victim.is_healthy)
    assert victim.metric("topwork_tp_group_restarts_total") >= 1
