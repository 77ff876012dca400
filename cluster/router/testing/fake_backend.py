"""A Backend in memory, for tests of routers: the real catalogue, without any weights or disks.

The content of an adapter is its path: equal paths are equal content.
"""

import asyncio
import time
from hashlib import sha256

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.loaded_adapters import LoadedAdapter
from cluster.adapters.peft.files import confine
from cluster.adapters.pins import Limits
from cluster.adapters.records import (
    AdapterRecord,
    Facts,
    Freed,
    LoadOptions,
    Outline,
    ResolvedAdapter,
    Source,
    UnloadResult,
)
from cluster.errors import Conflict, InvalidAdapter, Unavailable
from cluster.histogram import LOAD_BUCKETS, Histogram
from cluster.messages import AttachedSchedulers, SchedulerAddress
from cluster.metrics_hub import ClusterCounts, MetricsHub, PoolCounts, RouterCounts
from cluster.router.engine_client import EngineClient
from cluster.tenancy.budget_ledger import BudgetLedger
from cluster.tenancy.leases import LeaseCall, LeaseReply
from cluster.tenancy.owners import Caller
from worker.classifier_config import ClassifierConfig

NUM_BYTES = 1024  # of every adapter
HEADS = {  # by what is in the path of an adapter that has one
    "classifier": ClassifierConfig(("bad", "fair", "good"), "softmax"),
    "reranker": ClassifierConfig(("LABEL_0",), "sigmoid"),
}
SILENCE = 0.3  # seconds until a scheduler that does not answer is given up


class FakeBackend:
    """Names that point at paths, and a list of schedulers that a test may change."""

    def __init__(self, *addresses: SchedulerAddress, max_pinned: int = 3) -> None:
        self.addresses = addresses
        self.seconds_since_left: float | None = None
        self.is_down = False  # as far as the metrics hub and the ledger go
        self.forgotten: list[str] = []
        self.forced: list[str] = []  # names unloaded by force
        self.resolved: list[tuple[str, str]] = []  # names and request ids
        self.asked: list[tuple[str, ...]] = []  # names that may be absent, question by question
        self.uploads: dict[str, bytes] = {}  # under way
        self.upload_calls: list[tuple[str, bytes | None, LoadOptions]] = []
        self.aborted: list[str] = []
        self._is_drained = False
        self._pool = AdapterCatalog("tiny", Limits(host_bytes=1 << 30, num_slots=max_pinned + 1))
        self.ledger = BudgetLedger("fake")
        self.hub = MetricsHub(time.monotonic, self._pool.__contains__, _made_up_counts)

    def share(self, other: "FakeBackend") -> None:
        """Be of one cluster with another one: of one catalogue, one hub and one ledger."""
        self._pool, self.hub, self.ledger = other._pool, other.hub, other.ledger

    async def resolve(self, name: str, request_id: str) -> ResolvedAdapter:
        """Return what a request gets; what has "dora" in its path stands alone."""
        self.resolved.append((name, request_id))
        return self._pool.resolve(name, request_id)

    async def record(self, name: str) -> AdapterRecord:
        """Return the record of a name."""
        return self._pool.record(name)

    async def absent(self, names: tuple[str, ...]) -> frozenset[str]:
        """Return which of these names no adapter has."""
        self.asked.append(names)
        return frozenset(name for name in names if name not in self._pool)

    async def load(
        self,
        name: str,
        path: str,
        load_inplace: bool,
        pinned: bool,
        sha256: str | None = None,
        root: str | None = None,
        caller: Caller | None = None,
    ) -> AdapterRecord:
        """Point the name at a path; one with "broken" in it fails the check."""
        if root is not None:
            confine(path, (root,))
        if "broken" in path:
            raise InvalidAdapter(f"{path}: no adapter_config.json", "lora_path")
        record = self._pool.publish(
            name, _loaded(path), load_inplace=load_inplace, pinned=pinned, caller=caller
        )
        await self._reclaim()
        return record

    async def begin_upload(
        self, name: str, load_inplace: bool, num_bytes: int | None, caller: Caller | None = None
    ) -> str:
        """Begin to take in bytes."""
        self._pool.check_name(name, load_inplace=load_inplace)
        self._pool.check_room(name, caller, pinned=False)
        self.uploads[name] = b""
        return name

    async def upload_piece(self, upload: str, offset: int, data: bytes) -> None:
        """Take in bytes."""
        assert offset == len(self.uploads[upload]), "a piece is missing"
        self.uploads[upload] += data

    async def finish_upload(
        self, upload: str, name: str, config: bytes | None, options: LoadOptions
    ) -> AdapterRecord:
        """Point the name at a path that these bytes make; "broken" ones fail the check."""
        data = self.uploads.pop(upload)
        if b"broken" in data:
            raise InvalidAdapter("adapter_model.safetensors: damaged", "lora_path")
        self.upload_calls.append((name, config, options))
        path = "/staged/" + sha256((config or b"") + data).hexdigest()
        return await self.load(
            name, path, options.load_inplace, options.pinned, caller=options.caller
        )

    async def abort_upload(self, upload: str) -> None:
        """Forget the bytes."""
        self.uploads.pop(upload, None)
        self.aborted.append(upload)

    async def load_tensors(
        self, name: str, path: str, config: bytes, options: LoadOptions
    ) -> AdapterRecord:
        """Point the name at the path of a file."""
        self.upload_calls.append((name, config, options))
        return await self.load(
            name,
            path,
            options.load_inplace,
            options.pinned,
            root=options.root,
            caller=options.caller,
        )

    async def unload(self, name: str, force: bool) -> UnloadResult:
        """Take the name away, and its content from all schedulers if no other name has it."""
        history = self._pool.unload(name)
        if force:
            self.forced.append(name)
        freed = await self._reclaim()
        gone = {one.digest for one in freed}
        versions = tuple(version.number for version in history.versions)
        return UnloadResult(name, versions, freed, tuple(sorted(history.digests - gone)))

    async def rollback(self, name: str, version: int | None) -> AdapterRecord:
        """Give all requests to an earlier version, unless its path is "lost"."""
        target = self._pool.rollback_target(name, version)
        if "lost" in target.outline.source.path:
            raise Conflict(f"version {target.number} of {name!r} cannot be had", "version")
        return self._pool.rollback(name, target.number, {})

    async def split(self, name: str, shares: dict[int, int]) -> AdapterRecord:
        """Give shares of the requests to versions."""
        return self._pool.split(name, shares, {})

    async def pin(self, name: str, caller: Caller | None = None) -> AdapterRecord:
        """Pin a name."""
        return self._pool.pin(name, {}, caller)

    async def unpin(self, name: str) -> AdapterRecord:
        """Take a name's pin away."""
        return self._pool.unpin(name)

    async def records(self) -> tuple[AdapterRecord, ...]:
        """Return all records, ordered by name."""
        return self._pool.records()

    async def report(self, counts: RouterCounts, wants_all: bool) -> ClusterCounts:
        """Keep a router's counts; the pool's own are made up."""
        if self.is_down:
            raise Unavailable("the adapter pool is down")
        return self.hub.report(counts, wants_all)

    async def lease(self, call: LeaseCall) -> LeaseReply:
        """Grant leases out of a real ledger."""
        if self.is_down:
            raise Unavailable("the adapter pool is down")
        return self.ledger.lease(call, time.monotonic())

    async def schedulers(self) -> AttachedSchedulers:
        """Return the list of schedulers."""
        return AttachedSchedulers(self.addresses, self.seconds_since_left)

    async def drain(self) -> None:
        """Let all routers refuse new calls."""
        self._is_drained = True

    async def undrain(self) -> None:
        """Let routers take calls again."""
        self._is_drained = False

    async def is_drained(self) -> bool:
        """Return whether routers are to refuse new calls."""
        return self._is_drained

    async def _reclaim(self) -> tuple[Freed, ...]:
        freed = []
        for digest in sorted(self._pool.retired()):
            answers = [await _unload(address, digest) for address in self.addresses]
            lost = tuple(
                a.replica for a, pages in zip(self.addresses, answers, strict=True) if pages is None
            )
            pages = sum(pages for pages in answers if pages is not None)
            freed.append(Freed(digest, True, pages, (), self._pool.forget(digest), lost))
            self.forgotten.append(digest)
        return tuple(freed)


async def _unload(address: SchedulerAddress, digest: str) -> int | None:
    """Return how many pages a scheduler freed; None if it does not answer."""
    client = await EngineClient.connect(address, lambda: None)
    try:
        async with asyncio.timeout(SILENCE):
            return (await client.unload(digest)).freed_pages
    except (TimeoutError, Unavailable):
        return None
    finally:
        client.close("done")
        await client.wait_closed()


def _loaded(path: str) -> LoadedAdapter:
    digest = sha256(path.encode()).hexdigest()
    heads = [head for name, head in HEADS.items() if name in path]
    modules = ("q_proj", "v_proj")
    outline = Outline(Source(path), path, digest, 8, NUM_BYTES, modules, *heads)
    facts = Facts(
        digest=digest,
        outline=outline,
        host_bytes=NUM_BYTES,
        device_bytes=NUM_BYTES,
        stands_alone="dora" in path or bool(heads),
    )
    return LoadedAdapter(facts, ())


def _made_up_counts() -> PoolCounts:
    reads = {"ok": 11, "failed": 12}
    return PoolCounts(13, 14, 15, reads, Histogram(LOAD_BUCKETS).counts())
