import asyncio
import logging
from contextlib import suppress

import pytest

from cluster import supervision
from cluster.supervision import supervise
from tests.patience import PATIENCE


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "RESTART_DELAY", 0.0)


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (ValueError("broken"), "failed"),
        (asyncio.CancelledError(), "was cancelled by its own work"),
        (None, "ended, which it must not"),
    ],
)
async def test_a_task_that_ends_is_logged_counted_and_begun_again(
    caplog: pytest.LogCaptureFixture, end: BaseException | None, text: str
) -> None:
    begun, lasts = [0], asyncio.Event()
    failed: list[str] = []

    async def work() -> None:
        begun[0] += 1
        if begun[0] == 3:
            lasts.set()
            await asyncio.Event().wait()
        if end is not None:
            raise end

    task = asyncio.create_task(supervise("work", work, failed.append))
    async with asyncio.timeout(PATIENCE):
        await lasts.wait()
    assert failed == ["work", "work"]
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in records] == [f"the background task 'work' {text}"] * 2
    assert all((record.exc_info is not None) == (end is not None) for record in records)
    await cancel(task)
    assert task.cancelled()
    assert failed == ["work", "work"]


async def test_a_task_that_is_cancelled_with_its_supervisor_has_not_failed() -> None:
    failed: list[str] = []
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(supervise("work", work, failed.append))
    async with asyncio.timeout(PATIENCE):
        await begun.wait()
    await cancel(task)
    assert task.cancelled() and not failed
