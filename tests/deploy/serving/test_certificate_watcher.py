"""deploy.serving.haproxy.certificate_watcher: files that change, break and are mended."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.serving.haproxy.certificate_watcher import CertificateWatcher
from tests.deploy.certificates import write_certificate


class Taken:
    """What HAProxy would have been given."""

    def __init__(self) -> None:
        self.pems: list[str] = []
        self.refusal = ""

    async def __call__(self, pem: str) -> None:
        if self.refusal:
            raise ValueError(self.refusal)
        self.pems.append(pem)


def looks(watcher: CertificateWatcher, taken: Taken, number: int = 2) -> None:
    async def look() -> None:
        for _ in range(number):
            await watcher.look(taken)

    asyncio.run(look())


@pytest.fixture
def watcher(tmp_path: Path) -> CertificateWatcher:
    return CertificateWatcher(*write_certificate(tmp_path), tmp_path / "target.pem")


def test_the_file_of_haproxy_is_for_nobody_else(watcher: CertificateWatcher) -> None:
    pem = watcher.prepare()
    assert watcher.target.read_text() == pem
    assert watcher.target.stat().st_mode & 0o777 == 0o600


def test_what_has_changed_and_settled_is_taken_once(
    watcher: CertificateWatcher, tmp_path: Path
) -> None:
    first, taken = watcher.prepare(), Taken()
    looks(watcher, taken)
    assert taken.pems == []
    write_certificate(tmp_path, "other")
    looks(watcher, taken, 1)
    assert taken.pems == []
    looks(watcher, taken, 3)
    assert len(taken.pems) == 1 and taken.pems[0] != first
    assert watcher.target.read_text() == taken.pems[0]
    assert watcher.target.stat().st_mode & 0o777 == 0o600


def remove(folder: Path) -> None:
    (folder / "cert.pem").unlink()


def spoil(folder: Path) -> None:
    (folder / "key.pem").write_text("no key")


@pytest.mark.parametrize(("harm", "said"), [(remove, "cert.pem"), (spoil, "no private key")])
def test_of_broken_files_the_last_good_ones_stay_and_the_log_says_so_once(
    watcher: CertificateWatcher,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    said: str,
) -> None:
    first, taken = watcher.prepare(), Taken()
    kept = {path: path.read_bytes() for path in tmp_path.glob("*.pem")}
    harm(tmp_path)
    with caplog.at_level(logging.WARNING, "topwork.front_door"):
        looks(watcher, taken, 5)
        assert taken.pems == [] and watcher.target.read_text() == first
        (message,) = [record.getMessage() for record in caplog.records]
        assert said in message and "stays" in message
        for path, data in kept.items():
            path.write_bytes(data)
        looks(watcher, taken)
    assert "counts again" in caplog.records[-1].getMessage()
    assert taken.pems == []


def test_what_haproxy_refuses_is_tried_again_later(
    watcher: CertificateWatcher, tmp_path: Path
) -> None:
    first, taken = watcher.prepare(), Taken()
    write_certificate(tmp_path, "other")
    taken.refusal = "HAProxy is not there"
    looks(watcher, taken, 5)
    assert watcher.target.read_text() == first
    taken.refusal = ""
    looks(watcher, taken, 60)
    assert [watcher.target.read_text()] == taken.pems


def test_a_manager_that_begins_anew_with_broken_files_goes_on_with_what_there_was(
    watcher: CertificateWatcher, tmp_path: Path
) -> None:
    first = watcher.prepare()
    spoil(tmp_path)
    again = CertificateWatcher(tmp_path / "cert.pem", tmp_path / "key.pem", watcher.target)
    assert again.prepare() == first
    watcher.target.unlink()
    with pytest.raises(ValueError, match="no private key"):
        again.prepare()
