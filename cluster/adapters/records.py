"""What the control plane says of an adapter; frozen messages without behaviour."""

from typing import Literal

import msgspec

from cluster.tenancy.owners import Caller, Owner
from worker.classifier_config import ClassifierConfig

# Where the pool would take content from; "gone" if its directory holds something else by now.
Tier = Literal["host", "disk", "gone"]


class Source(msgspec.Struct, frozen=True):
    """A directory to read, and what confines the reading."""

    path: str  # absolute
    roots: tuple[str, ...] = ()  # resolved; nothing outside is read. (): no confinement


class Outline(msgspec.Struct, frozen=True):
    """What config, header and file system say of an adapter whose tensors are not read yet."""

    source: Source
    stamp: str  # inode, size and times of both files: equal unless they were touched
    identity: (
        str  # SHA-256 of config, header and stamp, hex: stands for the digest until it is known
    )
    lora_rank: int  # the largest of its modules
    num_bytes: int  # tensors as stored
    modules: tuple[str, ...]  # linear modules it touches
    classifier: ClassifierConfig | None = None  # of a head that it brings


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of content that has been read whole; sizes in bytes."""

    digest: str  # SHA-256 of tensors, scaling and targets, hex
    outline: Outline  # of the same bytes
    host_bytes: int  # of its shards, all ranks together
    device_bytes: int  # that it claims on each rank, at most
    stands_alone: bool = False  # cannot be summed with others
    layout: str = ""  # how it was cut: the sizes are of this layout only


class VersionRecord(msgspec.Struct, frozen=True):
    """One version of a name that is kept."""

    version: int
    digest: str | None  # None until its tensors are read for the first time
    path: str
    share: int  # percent of the requests that name the adapter
    since: int  # the first kept version of this name with the same digest
    tier: Tier


class AdapterRecord(msgspec.Struct, frozen=True):
    """One name in the catalogue and the content that most of its requests get."""

    name: str
    digest: str | None  # SHA-256 of tensors, scaling and targets, hex; None until first read
    version: int  # 1, 2, ... counted per name, one more with each new content
    path: str
    lora_rank: int  # the largest of its modules
    num_bytes: int  # tensors as stored
    modules: tuple[str, ...]  # linear modules it touches
    pinned: bool
    tier: Tier
    watched: bool = False  # found in an adapter directory and kept in step with it
    owner: Owner | None = None  # whose call has loaded it last; None: no call has
    versions: tuple[VersionRecord, ...] = ()  # all that are kept, ascending


class LoadOptions(msgspec.Struct, frozen=True):
    """How what is loaded gets its name."""

    load_inplace: bool = False  # the name may be taken: this is its next version
    pinned: bool = False
    sha256: str | None = None  # that the weights file must have, hex
    root: str | None = None  # nothing outside of this directory is read, either
    caller: Caller | None = None  # who loads it; None: nobody who could have limits


class ResolvedAdapter(msgspec.Struct, frozen=True):
    """What one request gets for a name."""

    name: str
    version: int
    digest: str
    num_bytes: int = 0  # it claims on the device of each rank, at most
    # DoRA, tables or a classification head of its own: cannot be summed with others.
    stands_alone: bool = False
    classifier: ClassifierConfig | None = None  # of a head that it brings


class FreedSlot(msgspec.Struct, frozen=True):
    """A device slot that an unloaded adapter left."""

    replica: str
    slot: int


class Freed(msgspec.Struct, frozen=True):
    """What became of one content after the last version that pointed at it."""

    digest: str
    forgotten: bool  # False: the same bytes were loaded again meanwhile, and stay
    pages: int  # of KV cache, over all replicas
    slots: tuple[FreedSlot, ...]
    host_bytes: int
    lost_replicas: tuple[str, ...]  # that did not answer; what they held ended with them


class UnloadResult(msgspec.Struct, frozen=True):
    """What unloading a name left."""

    name: str
    versions: tuple[int, ...]  # that were kept of it
    freed: tuple[Freed, ...]
    shared: tuple[str, ...]  # digests that stay because other names point at them
