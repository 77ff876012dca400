"""The fake ranks of the life cycle test leave no socket behind."""

import asyncio

import pytest

from tests.cluster.engine.life_ranks import Launcher, LoopRank
from worker.pools import PageCounts


def make_rank() -> LoopRank:
    launcher = Launcher(num_slots=1, num_pages=8, load_turns=1, adapters={}, unusable="")
    rank = LoopRank(launcher, 0)
    rank.rank.load(PageCounts(8), PageCounts(6))
    return rank


@pytest.mark.parametrize("turns", range(10))
def test_a_rank_whose_start_is_cancelled_listens_no_more(turns: int) -> None:
    async def cancelled_after_turns() -> None:
        rank = make_rank()
        start = asyncio.create_task(rank.serve(PageCounts(8), PageCounts(6)))
        for _ in range(turns):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait([start])
        rank.end()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        own_pipe = 1
        assert len(selector.get_map()) == own_pipe

    asyncio.run(cancelled_after_turns())
