"""Frames between a router and a scheduler: one message per step carries all streams together.

Owns the encoding only. The connection is the lease of its requests: when it closes, the scheduler
aborts everything that was submitted over it.
"""

import msgspec

from cluster.histogram import HistogramCounts
from cluster.kv_events import KvEventBatch
from cluster.request import ErrorInfo, Request, TokenEvent


class SchedulerAddress(msgspec.Struct, frozen=True):
    """Where a scheduler replica listens for routers, and the secret it wants to hear."""

    replica: str
    host: str
    port: int
    secret: bytes


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Router: run the choices of one prompt, all or none; events come back by request_id.

    They have the same prompt, adapter and salt. An error that keeps them out comes for each.
    """

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Router: drop this request; no further event is wanted."""

    request_id: str


class Unload(msgspec.Struct, frozen=True, tag=True):
    """Pool: refuse new work for this adapter, let running work end, then forget it wholly.

    With `force` running work is ended at once, with an error.
    """

    call_id: int
    adapter: str
    force: bool = False


class Allow(msgspec.Struct, frozen=True, tag=True):
    """Pool: take back an unload that is not complete."""

    adapter: str


class KeepPinned(msgspec.Struct, frozen=True, tag=True):
    """Pool: keep exactly these adapters in their slots, also when the ranks have restarted."""

    adapters: dict[str, int]  # and the bytes that each claims on a rank


class StatusCall(msgspec.Struct, frozen=True, tag=True):
    """Router: how are you?"""

    call_id: int


class FollowKvEvents(msgspec.Struct, frozen=True, tag=True):
    """Router: tell me what the prefix cache holds, then every change to it."""

    call_id: int


class KvEventsTaken(msgspec.Struct, frozen=True, tag=True):
    """Router: the reader of this call has taken one more batch; a few may be on their way."""

    call_id: int


class UnfollowKvEvents(msgspec.Struct, frozen=True, tag=True):
    """Router: no more batches for this call."""

    call_id: int


class Events(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: news of this router's requests after one step."""

    events: tuple[TokenEvent, ...]


class Unloaded(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: the adapter holds nothing any more; how much went."""

    call_id: int
    freed_pages: int
    freed_slots: tuple[int, ...]


class KvEvents(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: the next batch for a follower.

    The first ones are a snapshot: AllBlocksCleared, then what is there, parents before children.
    All of a snapshot's batches carry the number of the last batch that they include, so that the
    first change after it has the next number.
    """

    call_id: int
    batch: KvEventBatch


class KvEventsEnded(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: no more batches for this call, and why."""

    call_id: int
    error: ErrorInfo


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: I am to end. Submit no more; what runs may finish, and then hang up."""


class RankStatus(msgspec.Struct, frozen=True):
    """One rank as the scheduler sees it."""

    rank: int
    pid: int
    alive: bool
    last_step: int
    last_step_age: float  # seconds since its last completed step while work waits, else 0
    device: str
    weight_bytes: int
    kv_bytes: int


class SlotStatus(msgspec.Struct, frozen=True):
    """One occupied adapter slot."""

    slot: int
    adapter: str
    loading: bool
    leases: int  # sequences that hold the adapter
    pinned: bool = False
    claimed_bytes: int = 0  # on each rank, at most
    held_bytes: int = 0  # on the rank that holds most; 0 until it is loaded


class Status(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: counts for health, metrics and the adapter listing. Counters never fall."""

    call_id: int
    replica: str
    ready: bool  # ranks are up
    healthy: bool  # ranks are up and make progress
    reason: str  # why not, if not
    step: int
    restarts: int
    num_running: int
    num_waiting: int
    num_waiting_for_adapter: int
    free_pages: int
    cached_pages: int
    held_pages: int
    total_pages: int
    num_slots: int
    slots: tuple[SlotStatus, ...]
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    evicted_pages: int
    adapter_loads: int
    ranks: tuple[RankStatus, ...]
    free_host_pages: int = 0
    cached_host_pages: int = 0
    total_host_pages: int = 0
    saved_pages: int = 0
    restored_pages: int = 0
    evicted_host_pages: int = 0
    forked_sequences: int = 0
    longest_slot_wait: int = 0  # steps
    slot_wait_bound: int = 0  # steps
    late_hand_overs: int = 0  # of slots, later than that bound was when the adapter came
    adapter_memory: int = 0  # bytes on each rank for all adapters together; 0: no limit
    histograms: dict[str, HistogramCounts] = {}  # by a name of cluster.engine.metrics
    failures: dict[str, int] = {}  # groups of ranks that were given up, by cause
    oldest_wait: float = 0.0  # seconds, of the first to come that has never run
    adapter_evictions: int = 0  # out of slots
    failed_adapter_loads: int = 0  # into slots
    steps_ahead: int = 0  # whose plan was sent while the ranks ran the one before
    starting: bool = False  # the ranks have not been up yet


RouterFrame = (
    Submit
    | Abort
    | Unload
    | Allow
    | KeepPinned
    | StatusCall
    | FollowKvEvents
    | KvEventsTaken
    | UnfollowKvEvents
)
SchedulerFrame = Events | Unloaded | Status | KvEvents | KvEventsEnded | Leaving

_encoder = msgspec.msgpack.Encoder()
_router_decoder: msgspec.msgpack.Decoder[RouterFrame] = msgspec.msgpack.Decoder(RouterFrame)
_scheduler_decoder: msgspec.msgpack.Decoder[SchedulerFrame] = msgspec.msgpack.Decoder(
    SchedulerFrame
)


def encode(message: RouterFrame | SchedulerFrame) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(message)


def decode_router_frame(data: bytes) -> RouterFrame:
    """Return a router's message.

    Raises:
        msgspec.DecodeError: if the bytes are not one.
    """
    return _router_decoder.decode(data)


def decode_scheduler_frame(data: bytes) -> SchedulerFrame:
    """Return a scheduler's message.

    Raises:
        msgspec.DecodeError: if the bytes are not one.
    """
    return _scheduler_decoder.decode(data)
