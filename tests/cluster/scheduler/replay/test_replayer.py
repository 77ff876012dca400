"""A replay agrees with the run that was recorded, or names the first thing that differs."""

from pathlib import Path
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.checkpoint import read_state
from cluster.engine.recording import EventFile
from cluster.scheduler.events import AddAll, AnyEvent, Commit, Event, Schedule, TakeLoads
from cluster.scheduler.replay.event_log import (
    Begin,
    Checkpoint,
    Continue,
    LogError,
    Record,
    decode_checkpoint,
    decode_record,
    encode_checkpoint,
)
from cluster.scheduler.replay.journal import EventJournal
from cluster.scheduler.replay.plan_checksum import PlanChecksum
from cluster.scheduler.replay.replayer import Difference, Replay
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from tests.cluster.scheduler.random_life import read_records, record_lives
from tests.random_cases import num_cases
from worker.protocol import SamplingParams

replace = msgspec.structs.replace


def replay(*files: list[Record], state: Checkpoint | None = None) -> Replay:
    """Replay records up to the first difference; their place stands for their byte."""
    result = Replay()
    for records in files:
        result.begin_file(state)
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


def changed(records: list[Record], at: int, event: AnyEvent | Continue) -> list[Record]:
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
    config = tiny_config()
    engine.scheduler = Scheduler(config, journal=EventJournal(config, log, "test"))
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
    assert result.counts.schedulers == 2
    assert result.counts.requests >= 300
    steps = [r for r in records if isinstance(r.outcome, PlanChecksum)]
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
    assert found.expected == str(plain[at].outcome.fields[2])
    assert "token_ids=(2, 1, 9, 3, 4)" in found.found
    assert str(found).startswith(f"event {at + 1} (Schedule), step 1, chunks: the log has 6 ")


def test_another_sampling_parameter_is_noticed_in_the_starts(plain: list[Record]) -> None:
    found = difference(with_request(plain, sampling=SamplingParams(top_k=3)))
    assert (found.step, found.field) == (1, "starts")


def test_a_shorter_answer_is_noticed_where_the_client_is_told_that_it_ends(
    plain: list[Record],
) -> None:
    found = difference(with_request(plain, max_tokens=4))
    assert (found.call, found.step, found.field) == ("Commit", 4, "result")
    assert found.found.startswith("checksum ") and "TokenEvent(" in found.found


def told(result: Replay, event: Event) -> int:
    """Return the checksum of what an event comes to behind a replay."""
    scheduler = result._scheduler
    assert scheduler is not None
    return crc32(msgspec.msgpack.encode(scheduler.apply(event)))


def test_another_drawn_token_is_noticed_in_the_next_step(plain: list[Record]) -> None:
    at = first(plain, Commit)
    output = plain[at].event.output
    token = replace(output.tokens[4], token_id=output.tokens[4].token_id + 1)
    event = Commit(replace(output, tokens=(*output.tokens[:4], token, output.tokens[5])))
    spoilt = changed(plain, at, event)
    assert difference(spoilt).field == "result"
    spoilt[at] = replace(spoilt[at], outcome=told(replay(plain[:at]), event))
    found = difference(spoilt)
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
    at = next(i for i, r in enumerate(records) if isinstance(r.outcome, PlanChecksum))
    found = difference([*records[:at], replace(records[at], outcome=None)])
    assert (found.field, found.expected, found.step) == ("plan", "no plan", 1)


def test_another_answer_than_a_plan_is_a_difference(records: list[Record]) -> None:
    at = first(records, TakeLoads)
    found = difference([*records[:at], replace(records[at], outcome=1)])
    assert (found.call, found.field, found.expected) == ("TakeLoads", "result", "checksum 00000001")
    assert "AdapterLoad(" in found.found


def test_a_log_that_begins_in_the_middle_is_no_log(records: list[Record]) -> None:
    with pytest.raises(LogError, match="does not begin with a scheduler"):
        replay(records[1:])


def test_a_configuration_that_cannot_be_is_an_error_in_the_log(records: list[Record]) -> None:
    config = records[0].event.config | {"page_size": 0}
    with pytest.raises(LogError, match="page_size"):
        replay([Record(1, Begin("1", config))])


class Rotated:
    """FILE.1 and FILE after at least two turns, their states, and the chain's end."""

    def __init__(self, path: Path) -> None:
        (self.chain,) = record_lives(path, seed=8, num_requests=1500, max_bytes=500_000)
        paths = path.with_name("log.1"), path
        self.older, self.newer = (read_records(one) for one in paths)
        self.older_state, self.newer_state = (read_state(one) for one in paths)
        assert isinstance(self.older[0].event, Continue) and self.older_state is not None


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Rotated:
    return Rotated(tmp_path_factory.mktemp("rotated") / "log")


def test_each_file_of_a_log_replays_alone_and_both_in_sequence(rotated: Rotated) -> None:
    both = replay(rotated.older, rotated.newer, state=rotated.older_state)
    newer = replay(rotated.newer, state=rotated.newer_state)
    for result in (both, newer):
        assert result.difference is None
        assert result.chain == rotated.chain
        assert result.counts.schedulers == 1


def test_the_state_of_a_file_is_what_a_replay_of_the_one_before_comes_to(rotated: Rotated) -> None:
    assert replay(rotated.older, state=rotated.older_state).checkpoint() == rotated.newer_state


def test_a_file_that_goes_on_without_its_state_is_refused(rotated: Rotated) -> None:
    with pytest.raises(LogError, match="replay that first, or have its state in a file"):
        replay(rotated.newer)
    with pytest.raises(LogError, match="the state is the one behind event"):
        replay(rotated.newer, state=rotated.older_state)


def test_another_chain_than_that_of_the_file_before_is_a_difference(rotated: Rotated) -> None:
    newer = changed(rotated.newer, 0, replace(rotated.newer[0].event, digest=bytes(32)))
    found = replay(rotated.older, newer, state=rotated.older_state).difference
    assert found is not None
    assert (found.number, found.call, found.field) == (newer[0].number, "Continue", "chain")


def test_a_file_that_goes_on_in_the_middle_of_another_is_refused(rotated: Rotated) -> None:
    with pytest.raises(LogError, match="Continue"):
        replay([*rotated.older, *rotated.newer], state=rotated.older_state)


def test_a_damaged_state_is_refused(rotated: Rotated) -> None:
    assert rotated.newer_state is not None
    data = encode_checkpoint(rotated.newer_state)
    assert decode_checkpoint(data) == rotated.newer_state
    for spoilt in (data[:-1], data[:40] + b"!" + data[41:], b"topwork", b""):
        with pytest.raises(LogError, match="scheduler state"):
            decode_checkpoint(spoilt)


@pytest.fixture(scope="module")
def resumed(rotated: Rotated) -> tuple[list[object], Checkpoint, list[object]]:
    """The beginning of a file and its state, as lists of numbers and strings."""
    assert rotated.newer_state is not None
    records = [msgspec.msgpack.decode(msgspec.msgpack.encode(one)) for one in rotated.newer[:40]]
    return records, rotated.newer_state, msgspec.msgpack.decode(rotated.newer_state.state)


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


def ends_well(records: list[object], state: Checkpoint) -> None:
    """Replay to the end, a difference, or a log error."""
    result = Replay()
    result.begin_file(state)
    try:
        for offset, value in enumerate(records):
            result.apply(decode_record(msgspec.msgpack.encode(value), offset), offset)
            if result.difference is not None:
                assert str(result.difference)
                return
    except LogError as error:
        assert 0 <= error.offset < len(records)


@settings(max_examples=num_cases(200), deadline=None)
@given(data=st.data())
def test_a_hostile_log_ends_in_a_difference_or_a_log_error(
    data: st.DataObject, resumed: tuple[list[object], Checkpoint, list[object]]
) -> None:
    records, state, _ = resumed
    spoilt = list(records)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from([*range(len(spoilt))]))
        number, (tag, *fields), raised, outcome = spoilt[at]
        spoilt[at] = [number, [tag, *spoil(data, fields)], raised, outcome]
    ends_well(spoilt, state)


@settings(max_examples=num_cases(400), deadline=None)
@given(data=st.data())
def test_a_hostile_state_ends_in_a_difference_or_a_log_error(
    data: st.DataObject, resumed: tuple[list[object], Checkpoint, list[object]]
) -> None:
    records, state, (classes, rows, root) = resumed
    spoilt = list(rows)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(rows) - 1))
        kind, content = spoilt[at]
        spoilt[at] = [kind, spoil(data, content)]
    encoded = msgspec.msgpack.encode([classes, spoilt, root])
    ends_well(records, replace(state, state=encoded))
