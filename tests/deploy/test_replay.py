"""`topwork replay` on real files, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from cluster.engine.recording import state_path
from cluster.scheduler.events import AddAll
from cluster.scheduler.replay.event_log import MAGIC, Record
from cluster.scheduler.replay.plan_checksum import PlanChecksum
from tests.cluster.scheduler.random_life import read_records, record_lives, write_records
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]

replace = msgspec.structs.replace


def topwork_replay(*files: Path, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", "replay", *map(str, files)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A log of 600 requests in two lives, and where the chain of each ended."""
    path = tmp_path_factory.mktemp("recorded") / "log"
    return path, record_lives(path, seed=11, num_requests=300, num_lives=2)


def assert_the_same_plans(path: Path, chain: str, num_requests: int) -> None:
    """Replay two lives under two hash seeds."""
    for seed in ("1", "2"):
        run = topwork_replay(path, hash_seed=seed)
        assert run.returncode == 0, run.stdout + run.stderr
        assert f"the chain ends in {chain}" in run.stdout
        assert "schedulers: 2" in run.stdout
        assert int(run.stdout.split(" requests")[0].split()[-1]) >= num_requests


def test_requests_replay_to_the_same_plans_under_any_hash_seed(
    recorded: tuple[Path, list[str]],
) -> None:
    path, chains = recorded
    assert_the_same_plans(path, chains[-1], 600)


@pytest.mark.slow  # half a minute, and nothing else than 600 of them show
def test_5000_requests_replay_to_the_same_plans_under_any_hash_seed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    chains = record_lives(path, seed=11, num_requests=2500, num_lives=2)
    assert_the_same_plans(path, chains[-1], 5000)


def test_one_changed_event_is_reported_with_its_step_and_field(
    recorded: tuple[Path, list[str]], tmp_path: Path
) -> None:
    records = read_records(recorded[0])
    at = next(
        i
        for i, record in enumerate(records)
        if isinstance(record.outcome, PlanChecksum) and record.outcome.step == 99
    )
    plan = records[at].outcome
    fields = (*plan.fields[:3], replace(plan.fields[3], checksum=1))
    record = replace(records[at], outcome=replace(plan, fields=fields))
    changed = tmp_path / "changed"
    write_records(changed, [*records[:at], record, *records[at + 1 :]])
    run = topwork_replay(changed)
    assert run.returncode == 1
    assert f"event {at + 1} (Schedule), step 99, copies: the log has" in run.stdout
    assert "the same" not in run.stdout


def test_a_changed_request_is_reported(recorded: tuple[Path, list[str]], tmp_path: Path) -> None:
    def with_longer_prompts(records: Iterable[Record]) -> Iterable[Record]:
        for record in records:
            event = record.event
            if record.number > 500 and isinstance(event, AddAll):
                requests = (replace(r, token_ids=(5, 5)) for r in event.requests)
                record = replace(record, event=AddAll(tuple(requests)))
            yield record

    changed = tmp_path / "changed"
    write_records(changed, with_longer_prompts(read_records(recorded[0])))
    assert topwork_replay(changed).returncode == 1


def test_a_torn_log_is_replayed_up_to_the_tear(
    recorded: tuple[Path, list[str]], tmp_path: Path
) -> None:
    torn = tmp_path / "torn"
    write_records(torn, read_records(recorded[0])[:500])
    torn.write_bytes(torn.read_bytes()[:-3])
    run = topwork_replay(torn)
    assert run.returncode == 0
    assert "the log ends in a torn record at byte" in run.stdout
    assert "499 events" in run.stdout and "all plans are the same" in run.stdout


RECORD_FOR_EVER = """
import sys
from pathlib import Path
from tests.cluster.scheduler.random_life import record_lives

while True:
    record_lives(Path(sys.argv[1]), seed=1, num_requests=100)
    print("a life is over", flush=True)
"""


def test_a_process_that_is_killed_leaves_a_log_that_replays_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with subprocess.Popen(
        [sys.executable, "-c", RECORD_FOR_EVER, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    ) as recording:
        assert recording.stdout is not None
        for _ in range(2):
            assert recording.stdout.readline() == b"a life is over\n"
        recording.kill()
    record_lives(path, seed=2, num_requests=10)
    run = topwork_replay(path)
    assert run.returncode == 0, run.stdout
    assert "all plans are the same" in run.stdout and "note" not in run.stdout


def test_rotated_files_replay_alone_and_in_sequence(tmp_path: Path) -> None:
    path = tmp_path / "log"
    older = tmp_path / "log.1"
    (chain,) = record_lives(path, seed=3, num_requests=300, max_bytes=100_000)
    for files in ((older,), (path,), (older, path)):
        run = topwork_replay(*files)
        assert run.returncode == 0, run.stdout
    assert chain in run.stdout
    state_path(path).unlink()
    run = topwork_replay(path)
    assert run.returncode == 2
    assert "replay that first" in run.stdout


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"%PDF-1.7 and so on and so on", "this is no event log of this version"),
        (MAGIC + b"\x01\x00\x00\x00" + bytes(40), "a damaged record at byte 20"),
        (b"", "torn first line at byte 0"),
        (MAGIC, "no events"),
    ],
)
def test_a_file_that_is_no_log_is_an_error(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    run = topwork_replay(path)
    assert run.returncode == 2
    assert reason in run.stdout


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    run = topwork_replay(tmp_path / "nothing")
    assert run.returncode == 2 and "No such file" in run.stdout
    assert "Traceback" not in run.stderr
