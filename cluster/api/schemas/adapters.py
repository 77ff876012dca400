"""The messages of the adapter API: bodies, and entries of the catalogue made from its records."""

from typing import Annotated

import msgspec
from pydantic import ConfigDict, Field, RootModel

from cluster.adapters.records import AdapterRecord, VersionRecord
from cluster.api.schemas.requests import Body
from cluster.request import parts_of
from cluster.router.replica_set import Report

AdapterName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")]
AdapterPath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: AdapterPath
    load_inplace: bool = False
    pinned: bool = False
    # Of the weights that are fetched.
    sha256: Annotated[str | None, Field(pattern=r"^[0-9a-fA-F]{64}$")] = None


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: AdapterName
    force: bool = False


class RollbackBody(Body):
    """POST /v1/adapters/{name}/rollback; without a version, the one before."""

    version: Annotated[int | None, Field(ge=1)] = None


class PinBody(Body):
    """POST /v1/adapters/{name}/pin, which needs none."""


VersionNumber = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
Percent = Annotated[int, Field(ge=0, le=100, strict=True)]


class SplitBody(RootModel[Annotated[dict[VersionNumber, Percent], Field(max_length=16)]]):
    """POST /v1/adapters/{name}/split: share in percent by version; together 100."""

    model_config = ConfigDict(frozen=True)


class AdapterSlot(msgspec.Struct):
    """A scheduler replica that has the adapter in a slot."""

    replica: str
    slot: int
    loading: bool
    leases: int
    held_bytes: int  # of the slot, on the rank that holds most; 0 while it loads
    weight: float | None = None  # of the adapter in the slot's sum; null: the slot holds it alone


class VersionEntry(msgspec.Struct):
    """A version that is kept."""

    version: int
    digest: str | None  # null until its tensors are read, at its first request
    path: str
    share: int  # percent of the requests
    since: int  # the first kept version with the same digest
    tier: str
    leases: int  # sequences that hold it, over all replicas


class AdapterEntry(msgspec.Struct):
    """One name in the catalogue and where the content of its current version is now."""

    name: str
    digest: str | None
    version: int
    path: str
    lora_rank: int
    num_bytes: int
    modules: tuple[str, ...]
    pinned: bool
    watched: bool  # follows a directory of adapters
    tier: str  # "device" if in any slot, else where the pool would take it from
    leases: int  # sequences that hold it, over all replicas
    slots: list[AdapterSlot]
    versions: list[VersionEntry]


class LoadedAdapter(AdapterEntry, kw_only=True):
    """The response of POST /v1/load_lora_adapter: the entry, and what vLLM answers with."""

    message: str


class AdapterList(msgspec.Struct):
    """The response of GET /v1/adapters; `last_id` is what the next page comes `after`."""

    data: list[AdapterEntry]
    has_more: bool
    last_id: str | None
    object: str = "list"


SlotsByDigest = dict[str | None, list[AdapterSlot]]


def slots_by_digest(reports: tuple[Report, ...]) -> SlotsByDigest:
    """Return the slots that each adapter is in, alone or in a sum, by digest."""
    by_digest: SlotsByDigest = {}
    for report in reports:
        for slot in report.status.scheduler.slots if report.status is not None else ():
            for digest, weight in parts_of(slot.adapter):
                entry = AdapterSlot(
                    replica=report.replica,
                    slot=slot.slot,
                    loading=slot.loading,
                    leases=slot.leases,
                    held_bytes=slot.held_bytes,
                    weight=None if digest == slot.adapter else weight,
                )
                by_digest.setdefault(digest, []).append(entry)
    return by_digest


def _tier(tier: str, slots: list[AdapterSlot]) -> str:
    is_resident = any(not slot.loading and slot.weight is None for slot in slots)
    return "device" if is_resident else tier


def _version(record: VersionRecord, by_digest: SlotsByDigest) -> VersionEntry:
    slots = by_digest.get(record.digest, [])
    return VersionEntry(
        version=record.version,
        digest=record.digest,
        path=record.path,
        share=record.share,
        since=record.since,
        tier=_tier(record.tier, slots),
        leases=sum(slot.leases for slot in slots),
    )


def entry_of(record: AdapterRecord, by_digest: SlotsByDigest) -> AdapterEntry:
    """Return what is shown of an adapter."""
    slots = by_digest.get(record.digest, [])
    return AdapterEntry(
        name=record.name,
        digest=record.digest,
        version=record.version,
        path=record.path,
        lora_rank=record.lora_rank,
        num_bytes=record.num_bytes,
        modules=record.modules,
        pinned=record.pinned,
        watched=record.watched,
        tier=_tier(record.tier, slots),
        leases=sum(slot.leases for slot in slots),
        slots=slots,
        versions=[_version(version, by_digest) for version in record.versions],
    )
