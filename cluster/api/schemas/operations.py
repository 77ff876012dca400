"""The answers of routes for whoever runs the server."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class Health(msgspec.Struct):
    """The response of /health."""

    status: Literal["ok", "unhealthy"]
    reasons: list[str] | UnsetType = UNSET


class Readiness(msgspec.Struct):
    """The response of /ready."""

    status: Literal["ready", "not ready", "draining"]
    reasons: list[str] | UnsetType = UNSET


class Version(msgspec.Struct):
    """The response of /version."""

    version: str


class SchedulerReset(msgspec.Struct):
    """What a scheduler's prefix cache has forgotten, in pages."""

    replica: str
    freed_pages: int  # on the device
    freed_host_pages: int
    kept_pages: int  # on either tier: prefixes of running sequences


class Resets(msgspec.Struct):
    """The response of /reset_prefix_cache."""

    schedulers: list[SchedulerReset]
    status: Literal["reset"] = "reset"


class Remaining(msgspec.Struct):
    """What a scheduler still has to do."""

    replica: str
    running: int | UnsetType = UNSET
    waiting: int | UnsetType = UNSET
    error: str | UnsetType = UNSET  # why that is not known


class Draining(msgspec.Struct):
    """The response of POST /v1/drain."""

    refusing: str  # who, and from when
    in_flight: int
    schedulers: list[Remaining]
    status: Literal["draining"] = "draining"


class Undrained(msgspec.Struct):
    """The response of DELETE /v1/drain."""

    admitting: str  # who, and from when
    status: Literal["serving"] = "serving"


class KvMessage(msgspec.Struct):
    """One event of /v1/kv_events."""

    replica: str
    sequence: int
    ts: float
    events: list[dict[str, Any]]  # with vLLM's field names
