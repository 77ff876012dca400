"""The events of a scheduler: one message for each call that changes it.

A numbered log of them is the whole input of a scheduler: `Scheduler.apply` on a new one gives the
same plans. Frozen messages; what came of a call is no part of its event.
"""

from typing import Protocol

import msgspec

from cluster.errors import ErrorInfo
from cluster.request import Request
from worker.protocol import StepOutput


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What all events are; on the wire each is an array that begins with its tag."""


class AddAll(Event, frozen=True, array_like=True, gc=False, tag="addall"):
    """Queue the choices of one prompt; `Scheduler.add` is the same with one request."""

    requests: tuple[Request, ...]
    resumes: bool = False  # they had been let in before


class Abort(Event, frozen=True, array_like=True, gc=False, tag="abort"):
    """A client has gone."""

    seq_id: int


class Expire(Event, frozen=True, array_like=True, gc=False, tag="expire"):
    """The deadline of a sequence has passed: how time enters."""

    seq_id: int


class AdapterReady(Event, frozen=True, array_like=True, gc=False, tag="adapterready"):
    """Every rank has the adapter in its slot."""

    adapter: str


class AdapterFailed(Event, frozen=True, array_like=True, gc=False, tag="adapterfailed"):
    """An adapter could not be loaded."""

    adapter: str
    error: ErrorInfo


class Pin(Event, frozen=True, array_like=True, gc=False, tag="pin"):
    """Keep an adapter in its slot; it claims `num_bytes` on each rank."""

    digest: str
    num_bytes: int = 0


class Unpin(Event, frozen=True, array_like=True, gc=False, tag="unpin"):
    """Leave an adapter to the LRU order again."""

    digest: str


class Unload(Event, frozen=True, array_like=True, gc=False, tag="unload"):
    """Forget an adapter, at once with `force`."""

    digest: str
    force: bool = False


class Allow(Event, frozen=True, array_like=True, gc=False, tag="allow"):
    """Take an unload back."""

    digest: str


class ResetPrefixCache(Event, frozen=True, array_like=True, gc=False, tag="resetprefixcache"):
    """Forget all cached prefixes that no running sequence uses."""


class TakeLoads(Event, frozen=True, array_like=True, gc=False, tag="takeloads"):
    """Hand out the loads that can start."""


class TakeUnloaded(Event, frozen=True, array_like=True, gc=False, tag="takeunloaded"):
    """Hand out the unloads that are complete."""


class Schedule(Event, frozen=True, array_like=True, gc=False, tag="schedule"):
    """Plan a step; without a plan it still has let the queue for slots age."""


class Commit(Event, frozen=True, array_like=True, gc=False, tag="commit"):
    """The ranks have computed a step."""

    output: StepOutput


AnyEvent = (
    AddAll
    | Abort
    | Expire
    | AdapterReady
    | AdapterFailed
    | Pin
    | Unpin
    | Unload
    | Allow
    | ResetPrefixCache
    | TakeLoads
    | TakeUnloaded
    | Schedule
    | Commit
)


class Journal(Protocol):
    """Where a scheduler writes its events; never raises, whatever the disk does."""

    def received(self, event: Event) -> Event:
        """Return the event as a reader of the journal will see it; it is applied in its place."""
        ...

    def applied(self, event: Event, result: object) -> None:
        """Write an event and what it came to."""
        ...

    def raised(self, event: Event, error: Exception) -> None:
        """Write an event whose handler raised."""
        ...
