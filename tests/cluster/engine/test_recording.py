"""What a recording leaves on the disk: bounded, gone on with, and never in the way of serving."""

import logging
import os
import sys
from pathlib import Path

import pytest

from cluster.engine.checkpoint import checkpoint, main, read_state
from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.recording import (
    BUFFER_BYTES,
    Checkpointer,
    EventFile,
    Recording,
    RecordingConfig,
    state_path,
)
from cluster.scheduler.events import Abort
from cluster.scheduler.replay.event_log import MAGIC, Begin, LogError, Record, encode_record
from cluster.scheduler.scheduler import Scheduler
from tests.cluster.scheduler.conftest import tiny_config
from tests.cluster.scheduler.random_life import read_records, record_lives
from tests.patience import PATIENCE

OBSERVER = KvEventFeed("model", lambda: 0.0, None).observer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def numbers(path: Path) -> list[int]:
    return [record.number for record in read_records(path)]


def write(path: Path, count: int, max_bytes: int = 2**20) -> None:
    log = EventFile(path, max_bytes)
    for _ in range(count):
        if log.is_full:
            log.rotate(continues=True)
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


class Checkpoints(Checkpointer):
    """Writes no states, and is as busy as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = False
        self.calls: list[bool] = []

    @property
    def is_busy(self) -> bool:
        return self.busy

    def rotated(self, path: Path, older: Path, *, continues: bool) -> None:
        self.calls.append(continues)


def test_a_file_is_not_rotated_before_the_state_of_the_last_one_is_there(path: Path) -> None:
    checkpoints = Checkpoints()
    log = EventFile(path, 1000, checkpoints)
    while not log.is_full:
        log.write(Abort(1))
    checkpoints.busy = True
    assert not log.is_full
    log.write(Abort(1))
    checkpoints.busy = False
    assert log.is_full
    log.rotate(continues=True)
    log.close()
    assert checkpoints.calls == [True]


def test_a_state_that_takes_too_long_ends_the_recording_and_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints()
    checkpoints.busy = True
    log = EventFile(path, 1000, checkpoints)
    for _ in range(1000):
        assert not log.is_full
        log.write(Abort(1))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "takes too long" in caplog.text
    assert path.stat().st_size < 1100
    log.close()


def test_a_state_moves_with_its_file_and_goes_with_it(path: Path) -> None:
    older, state = path.with_name("log.1"), state_path(path)
    checkpointer = Checkpointer()
    state.write_bytes(b"of log")
    checkpointer.rotated(path, older, continues=False)
    assert state_path(older).read_bytes() == b"of log" and not state.exists()
    checkpointer.rotated(path, older, continues=False)
    assert not state_path(older).exists()
    checkpointer.close()


def test_the_state_at_the_end_of_a_file_is_written_by_a_process_of_its_own(path: Path) -> None:
    older = path.with_name("log.1")
    record_lives(older, seed=4, num_requests=40)
    checkpointer = Checkpointer()
    checkpointer.rotated(path, older, continues=True)
    assert checkpointer._process is not None and checkpointer._process.wait(PATIENCE) == 0
    assert not checkpointer.is_busy
    found = read_state(path)
    assert found == checkpoint(older)
    assert found is not None and found.number == numbers(older)[-1]
    assert state_path(path).stat().st_mode & 0o777 == 0o600
    assert sorted(one.name for one in path.parent.iterdir()) == ["log.1", "log.state"]


def test_no_state_is_written_of_a_file_that_does_not_replay(path: Path) -> None:
    older = path.with_name("log.1")
    write(older, 3)
    with pytest.raises(LogError, match="does not begin with a scheduler"):
        checkpoint(older)


def test_a_state_that_cannot_be_written_leaves_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_lives(path, seed=4, num_requests=5)
    target = tmp_path / "state"
    target.mkdir()
    monkeypatch.setattr(sys, "argv", ["checkpoint", str(path), str(target)])
    monkeypatch.setattr(os, "nice", lambda _: 0)
    with pytest.raises(SystemExit, match="no state of"):
        main()
    assert set(tmp_path.iterdir()) == {path, target}


def test_a_second_writer_is_refused(path: Path) -> None:
    log = EventFile(path, 2**20)
    with pytest.raises(OSError, match="another process"):
        EventFile(path, 2**20)
    log.rotate(continues=True)
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
    log.rotate(continues=True)
    log.close()
    assert len(caplog.records) == 1


def test_a_directory_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        EventFile(tmp_path / "nowhere" / "log", 2**20)


def test_without_a_file_a_scheduler_is_just_a_scheduler() -> None:
    recording = Recording(None)
    recording.open()
    assert type(recording.make_scheduler(tiny_config(), OBSERVER)) is Scheduler
    recording.flush()
    recording.close()


def test_each_scheduler_begins_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    recording = Recording(RecordingConfig(path=str(path), max_bytes=2**20, version="26.11"))
    recording.open()
    for _ in range(2):
        recording.make_scheduler(tiny_config(), OBSERVER).schedule()
    assert read_records(path) == []
    recording.flush()
    records = read_records(path)
    assert [record.number for record in records] == [1, 2, 3, 4]
    begins = [record.event for record in records if isinstance(record.event, Begin)]
    assert [begin.version for begin in begins] == ["26.11"] * 2
    recording.close()
