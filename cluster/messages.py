"""Frames between a router and a scheduler: one message per step carries all streams together.

Owns the encoding only. The connection is the lease of its requests: when it closes, the scheduler
aborts everything that was submitted over it.
"""

from typing import Annotated

import msgspec

from cluster.errors import ErrorInfo
from cluster.histogram import HistogramCounts
from cluster.kv_events import KvEventBatch
from cluster.request import Request, TokenEvent
from cluster.scheduler.stats import CacheReset, SchedulerStats, metric
from cluster.tenancy.usage import Usage


class SchedulerAddress(msgspec.Struct, frozen=True):
    """Where a scheduler replica listens for routers, and the secret it wants to hear."""

    replica: str
    host: str
    port: int
    secret: bytes


class AttachedSchedulers(msgspec.Struct, frozen=True):
    """The scheduler replicas that there are."""

    addresses: tuple[SchedulerAddress, ...]  # in order of their names
    # Since one has left in order, as one does that is being replaced; None: none has.
    seconds_since_left: float | None = None


class Keep(msgspec.Struct, frozen=True):
    """How long a call outlives its reader, and what the next one must know."""

    stream_id: str  # nobody can guess it
    seconds: float  # that it is kept when it has ended
    record: bytes  # the router's: whose call it is, and how its answer is spelled
    # That it goes on while nobody reads it. None: as many as above; infinity: it needs no reader.
    unread_seconds: float | None = None
    tells: bool = False  # an event without tokens says that the call has been let in


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Router: run the choices of one prompt, all or none; events come back by request_id.

    They have the same prompt, adapter and salt. An error that keeps them out comes for each.
    """

    requests: tuple[Request, ...]
    keep: Keep | None = None  # None: they end with their router
    wants_times: bool = False  # RequestTimes come for each


class Detach(msgspec.Struct, frozen=True, tag=True):
    """Router: the reader of this call has gone; keep it for the next one.

    It ends in time if there is none. A router that `follows` gets its events until then: somebody
    has to count its tokens.
    """

    stream_id: str
    follows: bool = False
    # Of each choice, the tokens that were had when it was claimed: the claim is taken back, and
    # whoever made it has counted nothing. (): it was no claim, or all that came was counted.
    told: tuple[int, ...] = ()


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Router: I have a reader for this call; its events are to come to me.

    The request of choice I is called PREFIX/I from here on.
    """

    call_id: int
    stream_id: str
    prefix: str


class Look(msgspec.Struct, frozen=True, tag=True):
    """Router: what is there of this call that is kept? Its reader keeps it."""

    call_id: int
    stream_id: str


class EndKept(msgspec.Struct, frozen=True, tag=True):
    """Router: end what runs of this call, whoever reads it; its reader learns of it.

    With `forgets` nothing of it is kept. The answer says what there was.
    """

    call_id: int
    stream_id: str
    forgets: bool


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


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Router: forget all cached prefixes that no running sequence uses."""

    call_id: int


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


class RequestTimes(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: how a request fares, in seconds since it came; before its first token and its end.

    Only for whoever asked for it with the request.
    """

    request_id: str
    start: float  # the first step with it was planned
    load_start: float | None = None  # of its adapter into a slot, as far as it waited for that
    load_end: float | None = None
    first_token: float | None = None
    end: float | None = None
    num_prefill_steps: int = 0  # of the ranks, until the first token
    prefill_rank_seconds: float = 0.0  # that those took
    num_decode_steps: int = 0  # from there to the end
    decode_rank_seconds: float = 0.0
    num_preemptions: int = 0
    num_recoveries: int = 0  # of its ranks, which were lost


class Claimed(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: what there is of a call so far; to who claims it, the rest comes as events."""

    call_id: int
    prefix: str  # "" to whoever only looks
    record: bytes = b""
    requests: tuple[Request, ...] = ()  # none: nothing is known of such a call
    events: tuple[tuple[TokenEvent, ...], ...] = ()  # of each choice
    told: tuple[int, ...] = ()  # of each choice, how many of these tokens some router has had


class UnreadUsage(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: what calls of a tenant had that no router has had; count it, for it is told once.

    Such calls have outlived the routers that read them.
    """

    tenant: str
    usage: Usage


class Unloaded(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: the adapter holds nothing any more; how much went."""

    call_id: int
    freed_pages: int
    freed_slots: tuple[int, ...]


class PrefixCacheReset(msgspec.Struct, frozen=True, tag=True):
    """Scheduler: the prefix cache is reset; how much went."""

    call_id: int
    result: CacheReset


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
    """One rank as the engine sees it."""

    rank: int
    pid: int
    alive: bool  # it takes plans, as far as is known
    last_step: int  # that it has answered
    last_step_age: Annotated[
        float,
        metric(
            "rank_last_step_age_seconds",
            "Time since a rank's last step while one is awaited, else 0.",
        ),
    ]
    device: str
    weight_bytes: Annotated[int, metric("rank_weight_bytes", "Bytes of a rank's weights.")]
    kv_bytes: Annotated[int, metric("rank_kv_bytes", "Bytes of a rank's KV pages.")]


class EngineCounters(msgspec.Struct):
    """Counted by an engine in the life of its process; nothing decides by them."""

    restarts: Annotated[int, metric("tp_group_restarts", "Restarts of the group of ranks.")] = 0
    failed_adapter_loads: Annotated[
        int,
        metric(
            "adapter_load_failures",
            "Loads into a slot that failed: requests ended with the reason.",
        ),
    ] = 0
    adapter_evictions: Annotated[
        int,
        metric("adapter_slot_evictions", "Adapters that another one put out of its slot."),
    ] = 0
    steps_ahead: Annotated[
        int,
        metric(
            "engine_steps_ahead", "Steps whose plan was sent while the ranks ran the one before."
        ),
    ] = 0
    grammar_masks: Annotated[
        int, metric("engine_grammar_masks", "Masks of grammars that tokens were drawn by.")
    ] = 0
    late_grammar_masks: Annotated[
        int, metric("engine_late_grammar_masks", "Masks of grammars that a step has waited for.")
    ] = 0


class Status(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Scheduler: how it and its ranks are, for health, metrics and the adapter listing."""

    call_id: int
    replica: str
    ready: Annotated[bool, metric("engine_ready", "1 if the ranks are up.")]
    healthy: Annotated[
        bool,
        metric("engine_healthy", "1 if the ranks are up and none is late with its step."),
    ]
    reason: str  # why not, if not
    starting: bool = False  # the ranks have not been up yet
    oldest_wait: Annotated[
        float,
        metric(
            "queue_age_seconds", "Wait so far of the oldest sequence that has never run, else 0."
        ),
    ] = 0.0
    scheduler: SchedulerStats = SchedulerStats()  # counters: of all schedulers of this engine
    engine: EngineCounters = msgspec.field(default_factory=EngineCounters)
    ranks: tuple[RankStatus, ...] = ()
    histograms: dict[str, HistogramCounts] = {}  # by a name of cluster.engine.metrics
    failures: dict[str, int] = {}  # groups of ranks that were given up, by cause


RouterFrame = (
    Submit
    | Abort
    | Detach
    | Claim
    | Look
    | EndKept
    | Unload
    | Allow
    | KeepPinned
    | ResetPrefixCache
    | StatusCall
    | FollowKvEvents
    | KvEventsTaken
    | UnfollowKvEvents
)
SchedulerFrame = (
    Events
    | RequestTimes
    | Claimed
    | UnreadUsage
    | Unloaded
    | PrefixCacheReset
    | Status
    | KvEvents
    | KvEventsEnded
    | Leaving
)

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
