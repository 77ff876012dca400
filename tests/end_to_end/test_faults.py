"""Ranks that die or hang under load: streams pause, and go on with the same tokens."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.chaos.traffic import Answer, Ask, answer_of, make_asks
from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import resident_bytes
from tests.end_to_end.server import MODELS, Server
from tests.patience import PATIENCE

pytestmark = [pytest.mark.model, pytest.mark.ray]

ASKS = [Ask(ask.number, ask.body | {"max_tokens": 90}) for ask in make_asks(MODELS[:5], 8, seed=3)]


def answers(server: Server, asks: list[Ask], strike: signal.Signals | None = None) -> list[Answer]:
    """Make all calls at once; strike a rank when most of them run."""
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        ThreadPoolExecutor(len(asks)) as threads,
    ):
        running = [threads.submit(answer_of, client, ask) for ask in asks]
        if strike is not None:
            wait_for(lambda: server.metric("topwork_requests_running") >= 6)
            os.kill(server.rank_pids()[0], strike)
        return [one.result() for one in running]


@pytest.mark.parametrize(
    "blow",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
    ],
)
def test_streams_outlive_a_lost_rank_with_the_same_tokens(
    victim: Server, blow: signal.Signals
) -> None:
    undisturbed = answers(victim, ASKS)
    pauses = victim.metrics().get("topwork_stream_pause_seconds_count", 0)
    family, memory = victim.processes(), resident_bytes(victim.processes())
    ranks = victim.rank_pids()
    assert len(ranks) == 2
    found = answers(victim, ASKS, blow)
    assert [answer.error for answer in found] == [""] * len(ASKS)
    for answer, expected in zip(found, undisturbed, strict=True):
        assert answer.content == expected.content
    assert not set(ranks) & set(victim.rank_pids())
    assert victim.metric("topwork_stream_pause_seconds_count") > pauses
    wait_for(victim.is_healthy)
    wait_for(lambda: len(victim.processes()) <= len(family) + 1)
    assert resident_bytes(victim.processes()) < 1.15 * memory
