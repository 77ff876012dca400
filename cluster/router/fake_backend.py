"""A Backend in memory, for tests of routers: the catalogue's rules without any weights.

The content of an adapter is its path: equal paths are equal content.
"""

from hashlib import sha256

from cluster.adapters.record import AdapterRecord, UnloadResult
from cluster.errors import InvalidAdapter, InvalidRequest, NotFound
from cluster.wire import SchedulerAddress


class FakeBackend:
    """Names that point at paths, and a list of schedulers that a test may change."""

    def __init__(self, *addresses: SchedulerAddress) -> None:
        self.addresses = addresses
        self.forgotten: list[str] = []
        self._records: dict[str, AdapterRecord] = {}

    async def resolve(self, name: str) -> AdapterRecord:
        """Return the record of a name."""
        if name not in self._records:
            raise NotFound(f"no adapter is called {name!r}", "model")
        return self._records[name]

    async def load(self, name: str, path: str, load_inplace: bool, pinned: bool) -> AdapterRecord:
        """Point the name at a path; one with "broken" in it fails the check."""
        if "broken" in path:
            raise InvalidAdapter(f"{path}: no adapter_config.json", "lora_path")
        known = self._records.get(name)
        if known is not None and not load_inplace:
            raise InvalidRequest(f"adapter {name!r} has already been loaded", "lora_name")
        record = AdapterRecord(
            name=name,
            digest=sha256(path.encode()).hexdigest(),
            version=1 if known is None else known.version + (known.path != path),
            path=path,
            lora_rank=8,
            num_bytes=1024,
            modules=("q_proj", "v_proj"),
            pinned=pinned,
            tier="host",
        )
        self._records[name] = record
        return record

    async def unload(self, name: str) -> UnloadResult:
        """Take the name away."""
        record = await self.resolve(name)
        del self._records[name]
        return UnloadResult(record.digest, not self._is_named(record.digest))

    async def forget(self, digest: str) -> None:
        """Note the digest, unless a name points at it again."""
        if not self._is_named(digest):
            self.forgotten.append(digest)

    async def records(self) -> tuple[AdapterRecord, ...]:
        """Return all records, ordered by name."""
        return tuple(self._records[name] for name in sorted(self._records))

    async def schedulers(self) -> tuple[SchedulerAddress, ...]:
        """Return the list of schedulers."""
        return self.addresses

    def _is_named(self, digest: str) -> bool:
        return any(record.digest == digest for record in self._records.values())
