"""Schedulers are recorded if that is asked for, all lives in one file, and otherwise are not."""

from pathlib import Path

from cluster.engine.kv_event_feed import KvEventFeed
from cluster.engine.recording import Recording, RecordingConfig
from cluster.scheduler.replay.event_log import Begin
from cluster.scheduler.scheduler import Scheduler
from tests.cluster.scheduler.conftest import tiny_config
from tests.cluster.scheduler.random_life import read_records

OBSERVER = KvEventFeed("model", lambda: 0.0, None).observer


def test_without_a_file_a_scheduler_is_just_a_scheduler() -> None:
    recording = Recording(None)
    recording.open()
    assert type(recording.make_scheduler(tiny_config(), OBSERVER)) is Scheduler
    recording.flush()
    recording.close()


def test_each_scheduler_begins_a_life_in_the_same_file(tmp_path: Path) -> None:
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
