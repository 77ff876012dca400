"""The file of usage: one line for each tenant and day, also after a crash."""

import asyncio
import json
from pathlib import Path

import pytest

from cluster.adapters.service.usage_file import UsageFile
from cluster.errors import Unavailable
from cluster.metrics_hub import RouterCounts
from cluster.tenancy.usage import Usage


class Days:
    def __init__(self) -> None:
        self.today = "2026-11-24"

    def __call__(self) -> str:
        return self.today


def counts(number: int, **requests: int) -> RouterCounts:
    usage = {tenant: Usage(count) for tenant, count in requests.items()}
    return RouterCounts("r", number, {}, {}, {}, 0, usage)


def read(path: Path) -> list[tuple[str, str, int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["date"], line["tenant"], line["requests"]) for line in lines]


def ignore(task: str) -> None:
    raise AssertionError(f"{task} failed")


def test_each_tenant_has_one_line_a_day_which_grows(tmp_path: Path) -> None:
    path, days = tmp_path / "usage.jsonl", Days()

    async def run() -> None:
        file = UsageFile(str(path), days, ignore)
        await file.open()
        file.take_in(counts(1, acme=1))
        await file.save()
        file.take_in(counts(2, acme=10, other=2))
        await file.save()
        assert read(path) == [(days.today, "acme", 10), (days.today, "other", 2)]
        days.today = "2026-11-25"
        file.take_in(counts(3, acme=11, other=2))
        await file.close()

    asyncio.run(run())
    assert read(path) == [
        ("2026-11-24", "acme", 10),
        ("2026-11-24", "other", 2),
        ("2026-11-25", "acme", 1),
    ]


def test_a_pool_that_ends_without_a_word_counts_nothing_twice(tmp_path: Path) -> None:
    path, days = tmp_path / "usage.jsonl", Days()

    async def run() -> None:
        for number, count in enumerate((4, 6, 9), 1):
            file = UsageFile(str(path), days, ignore)
            await file.open()
            file.take_in(counts(number, acme=count))
            await file.save()
            file.take_in(counts(number, acme=count + 1))  # lost, and told again
            assert file._task is not None
            file._task.cancel()

    asyncio.run(run())
    assert read(path) == [(days.today, "acme", 9)]


def test_a_day_that_ended_while_nothing_could_be_written_is_not_lost(tmp_path: Path) -> None:
    path, days = tmp_path / "usage.jsonl", Days()

    async def run() -> None:
        file = UsageFile(str(path), days, ignore)
        await file.open()
        file.take_in(counts(1, acme=4))
        path.rename(tmp_path / "away")
        with pytest.raises(OSError):
            await file.save()
        days.today = "2026-11-25"
        file.take_in(counts(2, acme=6))
        (tmp_path / "away").rename(path)
        await file.close()

    asyncio.run(run())
    assert read(path) == [("2026-11-24", "acme", 4), ("2026-11-25", "acme", 2)]


def test_a_state_that_is_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "usage.jsonl.state").write_text("{")
    file = UsageFile(str(tmp_path / "usage.jsonl"), Days(), ignore)
    with pytest.raises(Unavailable, match="cannot be used"):
        asyncio.run(file.open())


def test_without_a_file_nothing_is_counted() -> None:
    async def run() -> None:
        file = UsageFile(None, Days(), ignore)
        await file.open()
        file.take_in(counts(1, acme=1))
        await file.close()

    asyncio.run(run())
