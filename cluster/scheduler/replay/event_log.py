"""How a file holds numbered events.

After a first line that says what the file is, each record is its length and its CRC-32, 4 bytes
each, little-endian, and then msgpack. Records are numbered over all files and schedulers, so a lost
one is noticed. Readers trust nothing: a log may come from anyone.
"""

from collections.abc import Iterator
from dataclasses import asdict
from io import SEEK_END
from struct import Struct
from typing import Any, BinaryIO, Protocol
from zlib import crc32

import msgspec

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.events import AnyEvent, Event
from cluster.scheduler.replay.plan_checksum import PlanChecksum

MAGIC = b"topwork event log 8\n"
STATE_MAGIC = b"topwork scheduler state 6\n"
MAX_RECORD_BYTES = 2**30
MAX_PAGES = 2**25  # of each tier: a replay takes some bytes of memory for each
MAX_SLOTS = 2**16

_FRAME = Struct("<II")


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """A new scheduler, as whenever a group of ranks has come up."""

    version: str  # of topwork
    config: dict[str, int | bool | str]  # every key of SchedulerConfig


class Continue(msgspec.Struct, frozen=True, array_like=True, tag="continue"):
    """The scheduler of the file before, which this file goes on with."""

    version: str
    config: dict[str, int | bool | str]
    digest: bytes  # end of the chain of plans


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One event and how the call ended."""

    number: int  # 1, 2, 3, ... in the order of the calls
    event: AnyEvent | Begin | Continue
    raised: str | None = None  # class name of the exception, if the call raised one
    outcome: PlanChecksum | int | None = None  # of a plan, or the CRC-32 of another result


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """A scheduler between two records; FILE.state holds that at the beginning of FILE."""

    version: str
    number: int  # of the record before it
    step: int
    digest: bytes  # end of the chain of plans
    state: bytes  # see cluster.scheduler.replay.state


class EventLog(Protocol):
    """Where records are written to; never raises: a log that cannot be written ends by itself."""

    @property
    def is_full(self) -> bool:
        """Whether it is time for `rotate`."""

    def rotate(self, *, continues: bool) -> None:
        """Begin a new file: the next record is a Continue, or else a Begin."""

    def write(
        self,
        event: Event | Begin | Continue,
        raised: str | None = None,
        outcome: PlanChecksum | int | None = None,
    ) -> None:
        """Append the next record."""


class LogError(Exception):
    """A file that is no log, or is one up to a byte offset."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset  # of the first byte that cannot be used
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} at byte {self.offset}"


class TornLog(LogError):
    """The last record is not whole: its writer was killed, or is writing it now."""


_record_encoder = msgspec.msgpack.Encoder()
_record_decoder = msgspec.msgpack.Decoder(Record)
_checkpoint_decoder = msgspec.msgpack.Decoder(Checkpoint)


def encode_record(record: Record) -> bytes:
    """Return the frame of a record."""
    payload = _record_encoder.encode(record)
    assert len(payload) <= MAX_RECORD_BYTES, f"an event of {len(payload)} bytes"
    return _FRAME.pack(len(payload), crc32(payload)) + payload


def decode_record(payload: bytes, offset: int) -> Record:
    """Return the record of a frame that was read at `offset`.

    Raises:
        LogError: if it is none.
    """
    try:
        return _record_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LogError(offset, f"not an event: {error}") from error


def read_frames(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, payload) of each frame, from the start of the stream to its present end.

    Raises:
        TornLog: at the last record, if it is not whole.
        LogError: if the file is no log, or is damaged before its last record.
    """
    size = stream.seek(0, SEEK_END)
    stream.seek(0)
    magic = stream.read(len(MAGIC))
    if magic != MAGIC:
        if MAGIC.startswith(magic):
            raise TornLog(0, "the log ends in a torn first line")
        raise LogError(0, "this is no event log of this version of topwork")
    offset = len(MAGIC)
    while offset < size:
        head = stream.read(_FRAME.size)
        length, checksum = _FRAME.unpack(head) if len(head) == _FRAME.size else (0, 0)
        end = offset + _FRAME.size + length
        if len(head) < _FRAME.size or end > size:
            raise TornLog(offset, "the log ends in a torn record")
        if length > MAX_RECORD_BYTES:
            raise LogError(offset, f"a record of {length} bytes")
        payload = stream.read(length)
        if len(payload) < length or crc32(payload) != checksum:
            if end == size:
                raise TornLog(offset, "the log ends in a torn record")
            raise LogError(offset, "a damaged record")
        yield offset, payload
        offset = end


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return what FILE.state holds."""
    payload = _record_encoder.encode(checkpoint)
    return STATE_MAGIC + crc32(payload).to_bytes(4, "little") + payload


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Return what FILE.state held.

    Raises:
        LogError: if it is something else, or damaged.
    """
    head = len(STATE_MAGIC) + 4
    payload = memoryview(data)[head:]
    if not data.startswith(STATE_MAGIC):
        raise LogError(0, "this is no scheduler state of this version of topwork")
    if crc32(payload).to_bytes(4, "little") != data[head - 4 : head]:
        raise LogError(head, "a damaged scheduler state")
    try:
        return _checkpoint_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LogError(head, f"not a scheduler state: {error}") from error


def config_values(config: SchedulerConfig) -> dict[str, int | bool | str]:
    """Return a configuration as a log holds it."""
    values: dict[str, Any] = asdict(config)
    return values


def read_config(values: dict[str, int | bool | str]) -> SchedulerConfig:
    """Return the configuration that a log holds.

    Raises:
        ValueError: if it is none, or asks for more than a scheduler has.
    """
    known = set(SchedulerConfig.__dataclass_fields__)
    if set(values) != known:
        odd = ", ".join(sorted(known ^ set(values)))
        raise ValueError(f"the configuration is of another version of topwork: {odd}")
    config = msgspec.convert(values, SchedulerConfig)
    if config.most_pages > MAX_PAGES or config.num_slots > MAX_SLOTS:
        raise ValueError(f"more than {MAX_PAGES} pages or {MAX_SLOTS} slots")
    if config.num_pages < 1 or (config.window and config.num_window_pages < 1):
        raise ValueError("no pages")
    return config
