"""A file of keys that changes, breaks, vanishes and is mended while a router runs."""

import logging
import os
from pathlib import Path

import pytest

from cluster.errors import Unauthorized
from cluster.router.metrics.request_metrics import RouterMetrics
from cluster.router.tenancy.key_watcher import KeyWatcher

ONE, TWO = "{key: top-secret-1, tenant: a}", "{key: top-secret-2, tenant: b}"


class Watched:
    """A watcher of a file, and how often it has found that file of no use."""

    def __init__(self, path: Path) -> None:
        self.now = 100.0
        self.metrics = RouterMetrics("tiny", 10)
        self.watcher = KeyWatcher(path, self.metrics, lambda: self.now)

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            self.now += 1
            await self.watcher.look()

    @property
    def num_errors(self) -> float:
        return dict(self.metrics.counts("r").counters["api_key_file_errors"])[()]

    def knows(self, key: str) -> bool:
        try:
            self.watcher.ring.identify(key)
        except Unauthorized:
            return False
        return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(f"[{ONE}]")
    return path


async def test_a_changed_file_counts_at_the_second_look_that_sees_it(path: Path) -> None:
    watched = Watched(path)
    assert watched.metrics.key_file_loaded == 100.0
    path.write_text(f"[{TWO}]")
    await watched.look(1)
    assert watched.knows("top-secret-1") and not watched.knows("top-secret-2")
    await watched.look(1)
    assert watched.knows("top-secret-2") and not watched.knows("top-secret-1")
    assert (watched.metrics.key_file_loaded, watched.num_errors) == (102.0, 0)
    await watched.look()
    assert watched.metrics.key_file_loaded == 102.0  # there was nothing new


async def test_a_file_of_the_same_size_and_time_is_another_one_by_what_it_says(path: Path) -> None:
    watched, before = Watched(path), path.stat()
    path.write_text(f"[{ONE}]".replace("secret-1", "secret-9"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    await watched.look()
    assert watched.knows("top-secret-9") and not watched.knows("top-secret-1")


async def test_a_secret_that_kubernetes_replaces_by_a_link_is_seen(tmp_path: Path) -> None:
    for name, text in (("v1", f"[{ONE}]"), ("v2", f"[{TWO}]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.yaml").write_text(text)
    data, path = tmp_path / "..data", tmp_path / "keys.yaml"
    data.symlink_to("v1")
    path.symlink_to("..data/keys.yaml")
    watched = Watched(path)
    (tmp_path / "..data_tmp").symlink_to("v2")
    (tmp_path / "..data_tmp").rename(data)
    await watched.look()
    assert watched.knows("top-secret-2") and not watched.knows("top-secret-1")


async def test_a_file_that_is_being_written_is_not_taken_for_whole(path: Path) -> None:
    watched = Watched(path)
    lines = f"- {ONE}\n- {TWO}\n"
    for length in range(0, len(lines), 7):
        path.write_text(lines[:length])
        await watched.look(1)
        assert watched.knows("top-secret-1") and watched.num_errors == 0
    path.write_text(lines)
    await watched.look()
    assert watched.knows("top-secret-1") and watched.knows("top-secret-2")


@pytest.mark.parametrize(
    "broken", ["", "- {key: top-secret-3, tenant", f"[{ONE}, {ONE}]", "\0", "[" * 5000]
)
async def test_with_a_broken_file_the_last_good_keys_stay_and_it_is_told_until_it_is_mended(
    path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    watched = Watched(path)
    path.write_text(broken)
    with caplog.at_level(logging.INFO, "topwork.router"):
        await watched.look(5)
        assert watched.knows("top-secret-1")
        assert watched.num_errors == 4  # from the second look on
        (record,) = caplog.records  # not one each second
        assert record.levelno == logging.ERROR
        assert str(path) in record.message and "top-secret" not in record.message
        assert record.message.isprintable()
        assert watched.metrics.key_file_loaded == 100.0
        path.write_text(f"[{TWO}]")
        await watched.look(4)
    assert watched.knows("top-secret-2") and not watched.knows("top-secret-1")
    assert watched.num_errors == 4
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


async def test_a_file_that_is_away_leaves_the_keys_as_they_were(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched, text = Watched(path), path.read_text()
    path.unlink()
    await watched.look(3)
    assert watched.knows("top-secret-1") and watched.num_errors == 3
    path.mkdir()
    await watched.look(1)
    assert watched.knows("top-secret-1") and watched.num_errors == 4
    path.rmdir()
    path.write_text(text)
    await watched.look(2)
    assert watched.knows("top-secret-1") and watched.num_errors == 4
    path.write_bytes(b"\xff\xfe")
    await watched.look(2)
    assert watched.num_errors == 5
    path.write_text(text)
    await watched.look(1)
    assert watched.num_errors == 5
    levels = [record.levelname for record in caplog.records]
    assert levels == ["ERROR", "ERROR", "WARNING", "ERROR", "WARNING"]


@pytest.mark.parametrize("text", [None, "", "[{tenant: a}]"])
def test_a_router_does_not_start_with_a_file_that_cannot_be_used(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises((OSError, ValueError)):
        Watched(path)
