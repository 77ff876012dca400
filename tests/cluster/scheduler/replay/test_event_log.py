"""A log file is read up to what is wrong with it, and what is wrong is said with its byte."""

import io
import tracemalloc
from dataclasses import asdict
from struct import pack
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.events import Abort, Commit, Schedule
from cluster.scheduler.replay.event_log import (
    MAGIC,
    MAX_PAGES,
    Begin,
    LogError,
    Record,
    TornLog,
    config_values,
    decode_record,
    encode_record,
    read_config,
    read_frames,
)
from cluster.scheduler.replay.plan_checksum import PlanChecksum
from tests.cluster.scheduler.conftest import tiny_config
from worker.protocol import SampledToken, StepOutput

RECORDS = [
    Record(1, Begin("1", config_values(tiny_config()))),
    Record(2, Abort(5), "KeyError"),
    Record(3, Schedule(), None, PlanChecksum(1, b"chain", ())),
    Record(4, Commit(StepOutput(1, (SampledToken(1, 7, -0.25, ((7, -0.25),)),), (2,)))),
]
FRAMES = [encode_record(record) for record in RECORDS]
LOG = MAGIC + b"".join(FRAMES)


def read(data: bytes) -> list[Record]:
    return [decode_record(body, offset) for offset, body in read_frames(io.BytesIO(data))]


def read_until_error(data: bytes) -> tuple[list[Record], LogError | None]:
    records = []
    try:
        for offset, body in read_frames(io.BytesIO(data)):
            records.append(decode_record(body, offset))
    except LogError as error:
        return records, error
    return records, None


def test_what_was_written_is_read() -> None:
    assert read(LOG) == RECORDS


def test_a_log_cut_anywhere_gives_its_whole_records_and_says_where_it_is_torn() -> None:
    ends = [len(MAGIC)]
    for frame in FRAMES:
        ends.append(ends[-1] + len(frame))
    for size in range(len(LOG)):
        records, error = read_until_error(LOG[:size])
        whole = [end for end in ends if end <= size]
        assert records == RECORDS[: max(0, len(whole) - 1)]
        if size in ends:
            assert error is None
        else:
            assert isinstance(error, TornLog)
            assert error.offset == (whole[-1] if whole else 0)
            assert str(error).endswith(f"at byte {error.offset}")


def test_any_flipped_bit_behind_the_first_line_is_noticed() -> None:
    for at in range(len(MAGIC), len(LOG)):
        damaged = bytearray(LOG)
        damaged[at] ^= 1 << at % 8
        records, error = read_until_error(bytes(damaged))
        assert error is not None and records == RECORDS[: len(records)]
        assert error.offset <= at


def test_a_damaged_record_before_the_last_is_no_tear() -> None:
    damaged = bytearray(LOG)
    damaged[len(MAGIC) + 20] ^= 1
    with pytest.raises(LogError, match=f"a damaged record at byte {len(MAGIC)}") as caught:
        read(bytes(damaged))
    assert not isinstance(caught.value, TornLog)


def test_another_file_is_no_log() -> None:
    with pytest.raises(LogError, match="no event log") as caught:
        read(b"%PDF-1.7 and so on and so on")
    assert caught.value.offset == 0 and not isinstance(caught.value, TornLog)


@given(st.binary(max_size=300))
def test_hostile_bytes_are_never_more_than_a_log_error(data: bytes) -> None:
    for whole in (data, MAGIC + data, MAGIC + pack("<II", len(data), crc32(data)) + data):
        read_until_error(whole)


@given(st.data())
def test_a_frame_with_a_right_checksum_and_hostile_content_is_a_log_error(
    data: st.DataObject,
) -> None:
    body = bytearray(FRAMES[data.draw(st.integers(0, 3))][8:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    read_until_error(MAGIC + pack("<II", len(body), crc32(body)) + bytes(body))


def test_a_claimed_length_takes_no_memory() -> None:
    claims = [
        MAGIC + pack("<II", 2**32 - 1, 0) + bytes(64),
        MAGIC + pack("<II", 6, crc32(b"\xdd\xff\xff\xff\xff\x01")) + b"\xdd\xff\xff\xff\xff\x01",
    ]
    tracemalloc.start()
    for claim in claims:
        records, error = read_until_error(claim)
        assert not records and error is not None
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()


def test_a_configuration_comes_back_as_it_was() -> None:
    config = tiny_config(num_host_pages=3, prefix_cache=False)
    assert read_config(config_values(config)) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_pages": MAX_PAGES + 1}, "pages"),
        ({"num_host_pages": 2**62}, "pages"),
        ({"num_slots": 2**40}, "slots"),
        ({"num_pages": 0}, "no pages"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": "4"}, "page_size"),
        ({"prefix_cache": 1}, "prefix_cache"),
        ({"from_tomorrow": 1}, "from_tomorrow"),
    ],
)
def test_a_configuration_that_no_scheduler_has_is_refused(
    change: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        read_config(asdict(tiny_config()) | change)


def test_a_configuration_that_lacks_a_key_is_refused() -> None:
    values = asdict(tiny_config())
    del values["fairness"]
    with pytest.raises(ValueError, match="fairness"):
        read_config(values)
