"""A reader of KV events that keeps a set of blocks by them, and how vLLM's readers decode them."""

from typing import Any

import msgspec

from cluster.kv_events import MEDIUM, KvEvent, json_event
from cluster.scheduler.kv_cache.events import Tier
from cluster.scheduler.kv_cache.radix_tree import Namespace, PageKey


class VllmStored(msgspec.Struct, tag="BlockStored", kw_only=True):
    """The fields that a subscriber of vLLM's declares; others are ignored."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None


class VllmRemoved(msgspec.Struct, tag="BlockRemoved", kw_only=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class VllmCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


def as_vllm(payload: bytes) -> VllmBatch:
    return msgspec.msgpack.decode(payload, type=VllmBatch)


class Mirror:
    """What a reader knows: block hash to (medium, adapter, namespace if salted, tokens).

    The tokens are all from the beginning of the prompt. Asserts that every event fits what came
    before it.
    """

    def __init__(self) -> None:
        self.blocks: dict[Any, tuple[str, str | None, str | None, tuple[int, ...]]] = {}

    def read(self, event: dict[str, Any]) -> None:
        """Apply an event with vLLM's field names."""
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                assert self.blocks.pop(name)[0] == event["medium"], "removed from elsewhere"
        else:
            self._store(event)

    def read_all(self, events: list[KvEvent] | tuple[KvEvent, ...]) -> None:
        for event in events:
            self.read(json_event(event))

    def read_vllm(self, payload: bytes) -> None:
        for event in as_vllm(payload).events:
            self.read(msgspec.to_builtins(event))

    def _store(self, event: dict[str, Any]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        salts = event.get("extra_keys") or [None] * len(event["block_hashes"])
        before: tuple[int, ...] = () if parent is None else self.blocks[parent][3]
        tokens = tuple(event["token_ids"])
        assert len(tokens) == size * len(event["block_hashes"]) == size * len(salts)
        for number, (name, salt) in enumerate(zip(event["block_hashes"], salts, strict=True)):
            assert name not in self.blocks, "stored twice"
            path = before + tokens[: (number + 1) * size]
            key = None if salt is None else salt[0]
            self.blocks[name] = (event["medium"], event["lora_name"], key, path)


class Truth:
    """An observer that keeps what can be found, without any event: what a mirror must equal."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[Tier, Namespace, tuple[int, ...]]] = {}

    def stored(
        self,
        namespace: Namespace,
        parent: bytes,
        hashes: tuple[bytes, ...],
        keys: tuple[PageKey, ...],
        tier: Tier,
    ) -> None:
        path = () if parent == namespace.key else self.pages[parent][2]
        for name, key in zip(hashes, keys, strict=True):
            path += key
            self.pages[name] = (tier, namespace, path)

    def removed(self, namespace: Namespace, hashes: tuple[bytes, ...], tier: Tier) -> None:
        for name in hashes:
            assert self.pages.pop(name)[:2] == (tier, namespace)

    def seen_outside(self, unsalted: set[bytes]) -> dict[str, Any]:
        """Return what a mirror of JSON must hold; `unsalted` are keys of unsalted namespaces."""
        return {
            name.hex(): (
                MEDIUM[tier],
                None if space.adapter == "base" else space.adapter,
                None if space.key in unsalted else space.key.hex(),
                path,
            )
            for name, (tier, space, path) in self.pages.items()
        }
