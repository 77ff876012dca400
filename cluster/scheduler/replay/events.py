"""The events of a scheduler: one message for each call that changes it, in the order of the calls.

A log of them is the whole input of a scheduler's life: who makes the same calls on a new one gets
the same plans. Messages without behaviour.
"""

import msgspec

from cluster.request import ErrorInfo, Request
from cluster.scheduler.replay.plan_checksum import PlanMark
from cluster.scheduler.replay.scheduler_state import State
from cluster.scheduler.stats import AdapterLoad, UnloadedAdapter
from worker.protocol import StepOutput


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """A new scheduler, as at the start of each life of a group of ranks."""

    version: str  # of topwork
    config: dict[str, int | bool | str]  # every key of SchedulerConfig


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """The scheduler of the file before, which this file goes on with."""

    version: str
    config: dict[str, int | bool | str]
    digest: bytes  # end of the chain of plans
    state: State


class AddAll(msgspec.Struct, frozen=True, array_like=True, tag="addall"):
    """`Scheduler.add_all`; `add` is the same with one request."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """`Scheduler.abort`."""

    seq_id: int


class Expire(msgspec.Struct, frozen=True, array_like=True, tag="expire"):
    """`Scheduler.expire`: the deadline of a sequence has passed."""

    seq_id: int


class AdapterReady(msgspec.Struct, frozen=True, array_like=True, tag="adapterready"):
    """`Scheduler.adapter_ready`."""

    adapter: str


class AdapterFailed(msgspec.Struct, frozen=True, array_like=True, tag="adapterfailed"):
    """`Scheduler.adapter_failed`."""

    adapter: str
    error: ErrorInfo


class Pin(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """`Scheduler.pin`."""

    digest: str
    num_bytes: int = 0


class Unpin(msgspec.Struct, frozen=True, array_like=True, tag="unpin"):
    """`Scheduler.unpin`."""

    digest: str


class Unload(msgspec.Struct, frozen=True, array_like=True, tag="unload"):
    """`Scheduler.unload`."""

    digest: str
    force: bool = False


class Allow(msgspec.Struct, frozen=True, array_like=True, tag="allow"):
    """`Scheduler.allow`."""

    digest: str


class TakeLoads(msgspec.Struct, frozen=True, array_like=True, tag="takeloads"):
    """`Scheduler.take_loads`; a call that found nothing has changed nothing and is not here."""

    loads: tuple[AdapterLoad, ...]


class TakeUnloaded(msgspec.Struct, frozen=True, array_like=True, tag="takeunloaded"):
    """`Scheduler.take_unloaded`, likewise."""

    unloaded: tuple[UnloadedAdapter, ...]


class Schedule(msgspec.Struct, frozen=True, array_like=True, tag="schedule"):
    """`Scheduler.schedule`; without a plan it still has let the line for slots age."""

    plan: PlanMark | None


class Commit(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """`Scheduler.commit`."""

    output: StepOutput


Event = (
    Begin
    | Resume
    | AddAll
    | Abort
    | Expire
    | AdapterReady
    | AdapterFailed
    | Pin
    | Unpin
    | Unload
    | Allow
    | TakeLoads
    | TakeUnloaded
    | Schedule
    | Commit
)


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One event and how the call ended."""

    number: int  # 1, 2, 3, ... in the order of the calls
    event: Event
    raised: str | None = None  # class name of the exception, if the call raised one
