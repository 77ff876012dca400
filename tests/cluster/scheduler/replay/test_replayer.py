"""A replay agrees with the run that was recorded, or names the first thing that differs."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.event_file import EventFile
from cluster.scheduler.replay.event_log import LogError, decode_record
from cluster.scheduler.replay.events import AddAll, Begin, Commit, Event, Record, Resume, Schedule
from cluster.scheduler.replay.recorder import RecordedScheduler
from cluster.scheduler.replay.replayer import Difference, Replay
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from tests.cluster.scheduler.random_life import read_records, record_lives
from worker.protocol import SamplingParams

replace = msgspec.structs.replace


def replay(*files: list[Record]) -> Replay:
    """Replay records up to the first difference; their place stands for their byte."""
    result = Replay()
    for records in files:
        result.begin_file()
        for offset, record in enumerate(records):
            result.apply(record, offset)
            if result.difference is not None:
                return result
    return result


def difference(records: list[Record]) -> Difference:
    found = replay(records).difference
    assert found is not None, "the replay has noticed nothing"
    return found


def first(records: list[Record], kind: type[Event], after: int = 0) -> int:
    return next(i for i, r in enumerate(records) if i > after and isinstance(r.event, kind))


def changed(records: list[Record], at: int, event: Event) -> list[Record]:
    return [*records[:at], replace(records[at], event=event), *records[at + 1 :]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Record], list[str]]:
    """Two lives of a few hundred requests, and where their chains ended."""
    path = tmp_path_factory.mktemp("lives") / "log"
    chains = record_lives(path, seed=5, num_requests=150, num_lives=2)
    return read_records(path), chains


@pytest.fixture(scope="module")
def records(recorded: tuple[list[Record], list[str]]) -> list[Record]:
    return recorded[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """Six requests to the base model that all run at once; the first event is number 2."""
    path = tmp_path_factory.mktemp("plain") / "log"
    log = EventFile(path, 2**20)
    engine = FakeEngine(tiny_config())
    engine.scheduler = RecordedScheduler(tiny_config(), log, "test")
    for number in range(6):
        engine.add((number, 1, 2, 3, 4), max_tokens=5)
    engine.run()
    log.close()
    return read_records(path)


def test_a_replay_ends_in_the_chain_that_the_ranks_checked(
    recorded: tuple[list[Record], list[str]],
) -> None:
    records, chains = recorded
    result = replay(records)
    assert result.difference is None
    assert result.chain == chains[-1]
    second_life = first(records, Begin)
    assert replay(records[:second_life]).chain == chains[0]
    assert result.counts.events == len(records)
    assert result.counts.lives == 2
    assert result.counts.requests >= 300
    steps = [r.event for r in records if isinstance(r.event, Schedule) and r.event.plan]
    assert result.counts.steps == len(steps)


def with_request(records: list[Record], **changes: object) -> list[Record]:
    """Return the records with the third request changed."""
    (request,) = records[3].event.requests
    return changed(records, 3, AddAll((replace(request, **changes),)))


def test_another_prompt_is_noticed_in_the_chunks_of_its_first_step(plain: list[Record]) -> None:
    found = difference(with_request(plain, token_ids=(2, 1, 9, 3, 4)))
    at = first(plain, Schedule)
    assert (found.number, found.call, found.step) == (plain[at].number, "Schedule", 1)
    assert found.field == "chunks"
    assert found.expected == str(plain[at].event.plan.fields[2])
    assert "token_ids=(2, 1, 9, 3, 4)" in found.found
    assert str(found).startswith(f"event {at + 1} (Schedule), step 1, chunks: the log has 6 ")


def test_another_sampling_parameter_is_noticed_in_the_starts(plain: list[Record]) -> None:
    found = difference(with_request(plain, sampling=SamplingParams(top_k=3)))
    assert (found.step, found.field) == (1, "starts")


def test_a_longer_answer_is_noticed_where_the_sequence_should_have_ended(
    plain: list[Record],
) -> None:
    found = difference(with_request(plain, max_tokens=4))
    assert (found.step, found.field) == (5, "ends")


def test_another_drawn_token_is_noticed_in_the_next_step(plain: list[Record]) -> None:
    at = first(plain, Commit)
    output = plain[at].event.output
    token = replace(output.tokens[4], token_id=output.tokens[4].token_id + 1)
    event = Commit(replace(output, tokens=(*output.tokens[:4], token, output.tokens[5])))
    found = difference(changed(plain, at, event))
    assert (found.step, found.field) == (2, "chunks")


def test_a_lost_event_is_an_error_in_the_log(records: list[Record]) -> None:
    with pytest.raises(LogError, match=r"event 21 \(.*\) after 19 at byte 19"):
        replay(records[:19] + records[20:])


def test_a_call_that_raises_otherwise_is_a_difference(records: list[Record]) -> None:
    refused = next(i for i, r in enumerate(records) if r.raised == "Overloaded")
    for raised in (None, "Conflict"):
        found = difference(
            [*records[:refused], replace(records[refused], raised=raised), *records[refused + 1 :]]
        )
        assert (found.number, found.field) == (refused + 1, "exception")
        assert found.expected == (raised or "none")
        assert found.found.startswith("Overloaded: ")


def test_a_call_that_should_raise_and_does_not_is_a_difference(records: list[Record]) -> None:
    at = first(records, Schedule)
    found = difference([*records[:at], replace(records[at], raised="AssertionError")])
    assert (found.field, found.expected, found.found) == ("exception", "AssertionError", "none")


def test_a_plan_where_the_log_has_none_is_a_difference(records: list[Record]) -> None:
    at = next(i for i, r in enumerate(records) if isinstance(r.event, Schedule) and r.event.plan)
    found = difference(changed(records, at, Schedule(None)))
    assert (found.field, found.expected, found.step) == ("plan", "no plan", 1)


def test_a_log_that_begins_in_the_middle_is_no_log(records: list[Record]) -> None:
    with pytest.raises(LogError, match="does not begin with a scheduler"):
        replay(records[1:])


def test_a_configuration_that_cannot_be_is_an_error_in_the_log(records: list[Record]) -> None:
    config = records[0].event.config | {"page_size": 0}
    with pytest.raises(LogError, match="page_size"):
        replay([Record(1, Begin("1", config))])


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Record], list[Record], str]:
    """The records of FILE.1 and of FILE after at least two turns, and the chain's end."""
    path = tmp_path_factory.mktemp("rotated") / "log"
    (chain,) = record_lives(path, seed=8, num_requests=1500, max_bytes=500_000)
    older, newer = read_records(path.with_name("log.1")), read_records(path)
    assert isinstance(older[0].event, Resume) and isinstance(newer[0].event, Resume)
    return older, newer, chain


def test_each_file_of_a_log_replays_alone_and_both_in_sequence(
    rotated: tuple[list[Record], list[Record], str],
) -> None:
    older, newer, chain = rotated
    for files in ([newer], [older, newer]):
        result = replay(*files)
        assert result.difference is None
        assert result.chain == chain
        assert result.counts.lives == 1
    assert replay(older).difference is None


def test_files_in_the_wrong_order_replay_as_lives_of_their_own(
    rotated: tuple[list[Record], list[Record], str],
) -> None:
    older, newer, _ = rotated
    result = replay(newer, older)
    assert result.difference is None
    assert result.counts.lives == 2


def test_a_snapshot_that_is_not_what_was_replayed_so_far_is_a_difference(
    rotated: tuple[list[Record], list[Record], str],
) -> None:
    older, newer, _ = rotated
    resume = newer[0].event
    state = replace(resume.state, last_seq_id=resume.state.last_seq_id + 1)
    for event, field in (
        (replace(resume, state=state), "last_seq_id"),
        (replace(resume, digest=bytes(32)), "chain"),
    ):
        found = replay(older, changed(newer, 0, event)).difference
        assert found is not None
        assert (found.number, found.call, found.field) == (newer[0].number, "Resume", field)


def test_a_snapshot_in_the_middle_of_a_file_is_refused(
    rotated: tuple[list[Record], list[Record], str],
) -> None:
    older, newer, _ = rotated
    with pytest.raises(LogError, match="Resume"):
        replay([*older, *newer])


@pytest.fixture(scope="module")
def resumed(rotated: tuple[list[Record], list[Record], str]) -> list[object]:
    """The beginning of a file with a snapshot, as lists of numbers and strings."""
    _, newer, _ = rotated
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(record)) for record in newer[:40]]


def spoil(data: st.DataObject, value: object) -> object:
    """Return a value with one number or string somewhere in it replaced by another one."""
    if value is None or value == []:
        return value
    if isinstance(value, list):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], spoil(data, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value:
        key = data.draw(st.sampled_from(sorted(value)))
        return value | {key: spoil(data, value[key])}
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return data.draw(st.sampled_from(["", "base", "A", "B", "waiting", "running", "held"]))
    if isinstance(value, bytes):
        return value[::-1]
    return data.draw(st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**63])))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_hostile_log_ends_in_a_difference_or_a_log_error(
    data: st.DataObject, resumed: list[object]
) -> None:
    spoilt = list(resumed)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from([0] * 80 + [*range(len(spoilt))]))
        number, (tag, *fields), raised = spoilt[at]
        spoilt[at] = [number, [tag, *spoil(data, fields)], raised]
    result = Replay()
    result.begin_file()
    try:
        for offset, value in enumerate(spoilt):
            result.apply(decode_record(msgspec.msgpack.encode(value), offset), offset)
            if result.difference is not None:
                assert str(result.difference)
                return
    except LogError as error:
        assert 0 <= error.offset < len(spoilt)
