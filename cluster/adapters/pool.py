"""What adapters there are: names that point at content, and the content kept in host memory.

Owns the catalogue, the versions and which content stays in memory. Does no I/O: whoever holds it
reads directories and hands in what was read. Calls come one at a time, from one thread.
"""

import re
from collections import Counter
from dataclasses import dataclass

from cluster.adapters.adapter import Adapter
from cluster.adapters.host_tier import HostTier
from cluster.adapters.record import AdapterRecord, UnloadResult
from cluster.adapters.sharding import cut_all
from cluster.adapters.strict_json import shown
from cluster.errors import InvalidRequest, NotFound
from cluster.request import BASE
from worker.adapter_shard import AdapterShard

# What hubs and fine-tuning tools make; no space or control character, no dot file, no "../".
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:@+/-]{0,126}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class _Content:
    """What is known of an adapter while its tensors may be on disk only."""

    lora_rank: int
    num_bytes: int
    modules: tuple[str, ...]
    path: str  # where it was last read


@dataclass(frozen=True, slots=True)
class _Name:
    """What a name points at."""

    digest: str
    version: int
    path: str
    pinned: bool


class AdapterPool:
    """The catalogue of one base model's adapters, and a least-recently-used host tier of them.

    `base_name` is what clients call the base model; `host_bytes` is the host tier's budget.
    """

    def __init__(self, *, base_name: str, host_bytes: int) -> None:
        self._base_name = base_name
        self._names: dict[str, _Name] = {}
        self._contents: dict[str, _Content] = {}  # by digest; outlive their names until `forget`
        self._name_counts: Counter[str] = Counter()  # by digest
        self._pin_counts: Counter[str] = Counter()  # by digest
        self._host = HostTier(host_bytes)

    def check_name(self, name: str, *, load_inplace: bool) -> None:
        """Refuse a name that `publish` would refuse, before anything is read for it.

        Raises:
            InvalidRequest: if the name is malformed, the base model's or taken.
        """
        if NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"{shown(name)} cannot name an adapter: it takes 1 to 128 letters, digits and "
                "._:@+/- with a letter or digit at both ends",
                "lora_name",
            )
        if name in (self._base_name, BASE):
            raise InvalidRequest(f"{shown(name)} is the name of the base model", "lora_name")
        if name in self._names and not load_inplace:
            raise InvalidRequest(
                f"The lora adapter {shown(name)} has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                "lora_name",
            )

    def publish(
        self, name: str, adapter: Adapter, *, load_inplace: bool, pinned: bool
    ) -> AdapterRecord:
        """Point a name at an adapter: new content is a new version, the same content is not.

        Raises:
            InvalidRequest: as `check_name`, or if the host tier cannot hold one more pinned.
        """
        self.check_name(name, load_inplace=load_inplace)
        if pinned:
            self._check_pin(name, adapter)
        digest = adapter.digest
        before = self._names.get(name)
        if before is None:
            version = 1
        else:
            version = before.version + (before.digest != digest)
            self._detach(name)
        self._names[name] = _Name(digest, version, adapter.path, pinned)
        self._name_counts[digest] += 1
        self._pin_counts[digest] += pinned
        self._contents[digest] = _Content(
            adapter.lora_rank, adapter.num_bytes, adapter.module_names, adapter.path
        )
        self._host.add(adapter, is_pinned=self._pin_counts[digest] > 0)
        return self.resolve(name)

    def resolve(self, name: str) -> AdapterRecord:
        """Return what a name points at.

        Raises:
            NotFound: if there is no such name.
        """
        if name not in self._names:
            raise NotFound(f"The model {shown(name)} does not exist.", "model", "model_not_found")
        return self._record(name)

    def records(self) -> tuple[AdapterRecord, ...]:
        """Return the whole catalogue, ordered by name."""
        return tuple(self._record(name) for name in sorted(self._names))

    def unload(self, name: str) -> UnloadResult:
        """Take a name out of the catalogue; the content stays until `forget`, for running work.

        Raises:
            NotFound: if there is no such name.
        """
        if name not in self._names:
            raise NotFound(f"The lora adapter {shown(name)} cannot be found.", "lora_name")
        digest = self._names[name].digest
        self._detach(name)
        return UnloadResult(digest=digest, last_name=self._name_counts[digest] == 0)

    def forget(self, digest: str) -> None:
        """Free what is held of a content, unless a name points at it (again)."""
        if self._name_counts[digest] == 0:
            self._contents.pop(digest, None)
            self._host.discard(digest)
            del self._name_counts[digest]
            del self._pin_counts[digest]

    def missing(self, digest: str) -> str | None:
        """Return the directory to read before `take` can answer; None: it is in host memory.

        Raises:
            NotFound: if the content is not known (any more).
        """
        if digest not in self._contents:
            raise NotFound(f"The lora adapter of digest {shown(digest)} has been unloaded.")
        return None if digest in self._host else self._contents[digest].path

    def restore(self, adapter: Adapter) -> None:
        """Bring content back from disk; one that was forgotten meanwhile is not wanted back."""
        if adapter.digest in self._contents:
            self._host.add(adapter, is_pinned=self._pin_counts[adapter.digest] > 0)

    def take(self, digest: str) -> Adapter:
        """Return content that is in host memory, as the one used last.

        Raises:
            NotFound: if the content is not known (any more).
        """
        path = self.missing(digest)
        adapter = self._host.use(digest)
        assert adapter is not None, f"{digest} must be read from {path} and restored first"
        return adapter

    def shards(self, digest: str, tp: int) -> tuple[AdapterShard, ...]:
        """Return the shards of all `tp` ranks of what `take` returns."""
        return cut_all(self.take(digest), tp)

    def check(self) -> None:
        """Assert that names, contents and host tier agree."""
        self._host.check()
        digests = [entry.digest for entry in self._names.values()]
        pins = [entry.digest for entry in self._names.values() if entry.pinned]
        assert +self._name_counts == Counter(digests), "names are miscounted"
        assert +self._pin_counts == Counter(pins), "pins are miscounted"
        assert all(digest in self._contents for digest in digests), "a name points at nothing"
        assert all(digest in self._host for digest in pins), "a pinned adapter has left memory"

    def _record(self, name: str) -> AdapterRecord:
        entry = self._names[name]
        content = self._contents[entry.digest]
        return AdapterRecord(
            name=name,
            digest=entry.digest,
            version=entry.version,
            path=entry.path,
            lora_rank=content.lora_rank,
            num_bytes=content.num_bytes,
            modules=content.modules,
            pinned=entry.pinned,
            tier="host" if entry.digest in self._host else "disk",
        )

    def _check_pin(self, name: str, adapter: Adapter) -> None:
        """Refuse to pin more than the host tier can hold."""
        others = {
            entry.digest: self._contents[entry.digest].num_bytes
            for other, entry in self._names.items()
            if entry.pinned and other != name and entry.digest != adapter.digest
        }
        pinned_bytes = sum(others.values())
        if pinned_bytes + adapter.num_bytes > self._host.budget:
            raise InvalidRequest(
                f"{shown(name)} takes {adapter.num_bytes} bytes and cannot be pinned: "
                f"{pinned_bytes} of {self._host.budget} bytes of host memory are pinned already",
                "pinned",
            )

    def _detach(self, name: str) -> None:
        """Take a name from its content."""
        entry = self._names.pop(name)
        digest = entry.digest
        self._name_counts[digest] -= 1
        self._pin_counts[digest] -= entry.pinned
        if self._pin_counts[digest] == 0:
            self._host.unpin(digest)
        self._keep_readable(digest)

    def _keep_readable(self, digest: str) -> None:
        """Read content again, if it must be, from the directory of a name that it still has."""
        paths = [entry.path for entry in self._names.values() if entry.digest == digest]
        content = self._contents[digest]
        if paths and content.path not in paths:
            self._contents[digest] = _Content(
                content.lora_rank, content.num_bytes, content.modules, min(paths)
            )
