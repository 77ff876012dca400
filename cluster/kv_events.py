"""What the prefix cache holds, as told to readers outside: vLLM's events and how they are spelled.

Owns the events, the buffer that gathers them between two steps, and their two spellings: msgpack
as vLLM publishes it, and JSON. Inside, a block is named by the 32 bytes of its page's hash. Knows
neither sockets nor clocks, and nothing of who reads.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import msgspec

from cluster.request import BASE
from cluster.scheduler.kv_cache.events import Tier
from cluster.scheduler.kv_cache.radix_tree import Namespace, PageKey, namespace

MAX_BATCH_BLOCKS = 256  # so that no message is large, however much changes in a step
MEDIUM: dict[Tier, str] = {"device": "GPU", "host": "CPU"}  # vLLM's words


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive blocks of one namespace can be found from now on."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None  # None: the first of them begins a prompt
    token_ids: tuple[int, ...]  # of all the blocks, in order
    block_size: int  # tokens
    medium: str
    lora_name: str | None  # the adapter's digest; None: the base model
    namespace: bytes
    is_salted: bool  # the namespace is more than base model and adapter


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks cannot be found in this medium any more."""

    block_hashes: tuple[bytes, ...]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No block that was told of before can be found any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events that belong together, in the order in which they happened."""

    sequence: int  # 0, 1, 2, ... in the life of a scheduler process
    ts: float  # seconds since 1970
    events: tuple[KvEvent, ...]


def num_blocks(events: Iterable[KvEvent]) -> int:
    """Return how many blocks the events name."""
    return sum(0 if isinstance(e, AllBlocksCleared) else len(e.block_hashes) for e in events)


@dataclass(slots=True)
class _Stored:
    namespace: Namespace
    parent: bytes
    tier: Tier
    hashes: list[tuple[bytes, ...]]  # one for each call that was joined
    keys: list[tuple[PageKey, ...]]


@dataclass(slots=True)
class _Removed:
    tier: Tier
    hashes: list[tuple[bytes, ...]]


class KvEventBuffer:
    """A cache's observer: gathers its events until they are taken, neighbours joined."""

    def __init__(self, base_digest: str) -> None:
        self._base_digest = base_digest
        self.changes: list[_Stored | _Removed | None] = []  # None: all is gone

    def stored(
        self,
        namespace: Namespace,
        parent: bytes,
        hashes: tuple[bytes, ...],
        keys: tuple[PageKey, ...],
        tier: Tier,
    ) -> None:
        """Note pages that can be found from now on; see CacheObserver."""
        assert hashes, "told of no page"
        last = self.changes[-1] if self.changes else None
        if (
            isinstance(last, _Stored)
            and last.hashes[-1][-1] == parent
            and (last.namespace, last.tier) == (namespace, tier)
        ):
            last.hashes.append(hashes)
            last.keys.append(keys)
        else:
            self.changes.append(_Stored(namespace, parent, tier, [hashes], [keys]))

    def removed(self, namespace: Namespace, hashes: tuple[bytes, ...], tier: Tier) -> None:
        """Note pages that cannot be found in this tier any more; see CacheObserver."""
        last = self.changes[-1] if self.changes else None
        if isinstance(last, _Removed) and last.tier == tier:
            last.hashes.append(hashes)
        else:
            self.changes.append(_Removed(tier, [hashes]))

    def cleared(self) -> None:
        """Note that the cache is gone; what was noted before it does not matter any more."""
        self.changes = [None]

    def take(self) -> list[KvEvent]:
        """Return the events since the last call, in order."""
        return [event for batch in self.take_batches() for event in batch]

    def take_batches(self) -> Iterator[tuple[KvEvent, ...]]:
        """Return the events since the last call in batches of at most MAX_BATCH_BLOCKS blocks.

        They are taken now and made when they are asked for: a whole cache is too much at once.
        """
        changes, self.changes = self.changes, []
        return _batches(event for change in changes for event in self._events(change))

    def _events(self, change: _Stored | _Removed | None) -> Iterator[KvEvent]:
        if change is None:
            yield AllBlocksCleared()
            return
        medium, hashes = MEDIUM[change.tier], tuple(chain.from_iterable(change.hashes))
        for start in range(0, len(hashes), MAX_BATCH_BLOCKS):
            part = hashes[start : start + MAX_BATCH_BLOCKS]
            if isinstance(change, _Removed):
                yield BlockRemoved(part, medium)
            else:
                parent = hashes[start - 1] if start else change.parent
                keys = islice(chain.from_iterable(change.keys), start, start + len(part))
                yield self._stored(change.namespace, parent, part, tuple(keys), medium)

    def _stored(
        self,
        space: Namespace,
        parent: bytes,
        hashes: tuple[bytes, ...],
        keys: tuple[PageKey, ...],
        medium: str,
    ) -> BlockStored:
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent == space.key else parent,
            token_ids=tuple(chain.from_iterable(keys)),
            block_size=len(keys[0]),
            medium=medium,
            lora_name=None if space.adapter == BASE else space.adapter,
            namespace=space.key,
            is_salted=space != namespace(self._base_digest, space.adapter, ""),
        )


def _batches(events: Iterator[KvEvent]) -> Iterator[tuple[KvEvent, ...]]:
    batch: list[KvEvent] = []
    size = 0
    for event in events:
        more = num_blocks((event,))
        if batch and size + more > MAX_BATCH_BLOCKS:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(event)
        size += more
    if batch:
        yield tuple(batch)


def short_hash(block_hash: bytes) -> int:
    """Return a hash as vLLM publishes it by default: its last 64 bits as an unsigned integer."""
    return int.from_bytes(block_hash[-8:], "big")


def vllm_payload(batch: KvEventBatch) -> bytes:
    """Return a batch as vLLM's subscribers decode it: an array of ts, events and a rank, 0.

    An event is a map, as vLLM has encoded it since 0.24. Hashes are integers because that is what
    vLLM sends unless told otherwise, and the only form that all known indexers accept.
    """
    events = [_fields(event, short_hash) for event in batch.events]
    return msgspec.msgpack.encode([batch.ts, events, 0])


def json_event(event: KvEvent) -> dict[str, Any]:
    """Return an event with vLLM's field names and whole hashes, in hex."""
    return _fields(event, bytes.hex)


def _fields(event: KvEvent, spell: Callable[[bytes], int | str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__}
    if isinstance(event, AllBlocksCleared):
        return fields
    fields["block_hashes"] = [spell(block_hash) for block_hash in event.block_hashes]
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        fields |= {
            "parent_block_hash": None if parent is None else spell(parent),
            "token_ids": event.token_ids,
            "block_size": event.block_size,
            "lora_id": None,
            "lora_name": event.lora_name,
            "namespace": event.namespace.hex(),
        }
        if event.is_salted:
            # Only then: indexers recompute a block's identity from its tokens, lora_name and extra
            # keys, and for a prompt without a salt they expect none.
            fields["extra_keys"] = [[event.namespace.hex()]] * len(event.block_hashes)
    fields["medium"] = event.medium
    return fields
