"""What a recording leaves on the disk: bounded, gone on with, and never in the way of serving."""

import logging
from pathlib import Path

import pytest

from cluster.engine.event_file import BUFFER_BYTES, EventFile
from cluster.scheduler.replay.event_log import MAGIC, LogError, encode_record
from cluster.scheduler.replay.events import Abort, Record
from tests.cluster.scheduler.random_life import read_records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def numbers(path: Path) -> list[int]:
    return [record.number for record in read_records(path)]


def write(path: Path, count: int, max_bytes: int = 2**20) -> None:
    log = EventFile(path, max_bytes)
    for _ in range(count):
        if log.is_full:
            log.turn()
        log.write(Abort(1))
    log.close()


def test_a_file_can_be_read_by_its_owner_alone(path: Path) -> None:
    write(path, 1)
    assert path.stat().st_mode & 0o777 == 0o600


def test_events_are_numbered_through_all_openings(path: Path) -> None:
    for _ in range(3):
        write(path, 4)
    assert numbers(path) == list(range(1, 13))


def test_a_torn_record_is_cut_off_and_the_log_goes_on(path: Path) -> None:
    write(path, 4)
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, len(MAGIC), -1):
        path.write_bytes(whole[:cut])
        write(path, 1)
        found = numbers(path)
        assert found == list(range(1, len(found) + 1)) and found


def test_a_first_line_that_was_cut_off_is_written_again(path: Path) -> None:
    for size in range(len(MAGIC)):
        path.write_bytes(MAGIC[:size])
        write(path, 2)
        assert numbers(path) == [1, 2]


def test_a_file_that_is_no_log_is_refused_and_left_alone(path: Path) -> None:
    path.write_text("my only copy of the thesis")
    with pytest.raises(LogError, match="no event log"):
        EventFile(path, 2**20)
    assert path.read_text() == "my only copy of the thesis"


def test_a_damaged_log_is_kept_as_the_older_one(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, 9)
    damaged = bytearray(path.read_bytes())
    damaged[len(MAGIC) + 2 * len(encode_record(Record(1, Abort(1)))) + 9] ^= 1
    path.write_bytes(damaged)
    write(path, 2)
    assert path.with_name("log.1").read_bytes() == damaged
    assert numbers(path) == [3, 4]
    assert "damaged" in caplog.text


def test_both_files_together_keep_the_bound(path: Path) -> None:
    older = path.with_name("log.1")
    write(path, 5000, max_bytes=20_000)
    assert path.stat().st_size + older.stat().st_size <= 20_000 + 100
    assert older.stat().st_size >= 10_000
    found = numbers(older) + numbers(path)
    assert found == list(range(found[0], 5001))
    assert sorted(file.name for file in path.parent.iterdir()) == ["log", "log.1"]


def test_a_log_whose_newer_file_is_lost_goes_on_with_the_numbers_of_the_older(path: Path) -> None:
    write(path, 7)
    path.rename(path.with_name("log.1"))
    write(path, 1)
    assert numbers(path) == [8]


def test_a_file_grows_to_twice_its_snapshot_however_small_the_bound(path: Path) -> None:
    write(path, 1)
    one = path.stat().st_size
    write(path, 100, max_bytes=10)
    older = path.with_name("log.1").stat().st_size
    assert 2 * one <= older < 3 * one


def test_a_second_writer_is_refused(path: Path) -> None:
    log = EventFile(path, 2**20)
    with pytest.raises(OSError, match="another process"):
        EventFile(path, 2**20)
    log.turn()
    with pytest.raises(OSError, match="another process"):
        EventFile(path, 2**20)
    log.close()
    EventFile(path, 2**20).close()


def test_little_is_lost_with_the_process_and_nothing_after_a_flush(path: Path) -> None:
    log = EventFile(path, 2**20)
    log.write(Abort(1))
    assert numbers(path) == []
    log.flush()
    assert numbers(path) == [1]
    while not log._buffer:
        log.write(Abort(1))
    for _ in range(BUFFER_BYTES // 10):
        log.write(Abort(1))
    assert path.stat().st_size >= BUFFER_BYTES
    log.close()


def test_a_full_disk_ends_the_recording_and_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventFile(path, 2**20)
    log._file.close()
    log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    log.write(Abort(1), "KeyError")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "No space left" in caplog.text
    log.write(Abort(1), "KeyError")
    log.flush()
    assert not log.is_full
    log.turn()
    log.close()
    assert len(caplog.records) == 1


def test_a_directory_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        EventFile(tmp_path / "nowhere" / "log", 2**20)
