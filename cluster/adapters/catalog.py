"""What adapters there are: names that point at versions, versions that point at content.

Also decides what is pinned, and which content is held until when. Does no I/O: whoever holds it
reads directories and hands in what was read. Calls come one at a time, from one thread.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cluster.adapters.catalog_records import adapter_record
from cluster.adapters.holdings import Holdings
from cluster.adapters.host_cache import HostCache, Shards
from cluster.adapters.loaded_adapters import Contents, LoadedAdapter
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.pins import Limits
from cluster.adapters.records import AdapterRecord, Facts, Outline, ResolvedAdapter, Source
from cluster.adapters.saved_state import name_entry
from cluster.adapters.versions import History, Version, check_name_form, first
from cluster.errors import InvalidRequest, NotFound, adapter_not_found
from cluster.tenancy.owners import Caller


class AdapterCatalog:
    """The catalogue of one base model's adapters, and a least-recently-used host cache of them.

    `base_name` is what clients call the base model.
    """

    def __init__(self, base_name: str, limits: Limits) -> None:
        self._base_name = base_name
        self._names: dict[str, History] = {}
        self._last_numbers: dict[str, int] = {}  # of every name that ever was
        self._unread: dict[str, dict[tuple[str, int], None]] = {}  # versions by path
        self._contents = Contents(limits)
        self._holdings = Holdings()
        self._note: Callable[[str], None] = lambda entry: None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def host_cache(self) -> HostCache:
        """What is in host memory; to look at."""
        return self._contents.host_cache

    def check_name(self, name: str, *, load_inplace: bool) -> None:
        """Refuse a name that `publish` would refuse, before anything is read for it.

        Raises:
            InvalidRequest: if the name is malformed, the base model's or taken.
        """
        check_name_form(name, self._base_name)
        if name in self._names and not load_inplace:
            raise InvalidRequest(
                f"The lora adapter {shown(name)} has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                "lora_name",
            )

    def check_room(self, name: str, caller: Caller | None, *, pinned: bool) -> None:
        """Refuse what `publish` would refuse whatever it is, before anything is read for it.

        Raises:
            Forbidden: if the caller may load or pin no more.
        """
        if caller is not None:
            self._holdings.check_room(name, caller, pinned=pinned)

    def register(
        self, name: str, outline: Outline, *, load_inplace: bool = False, watched: bool = False
    ) -> AdapterRecord:
        """Point a name at a directory whose tensors are not read before the first request.

        Raises:
            InvalidRequest: as `check_name`.
        """
        self.check_name(name, load_inplace=load_inplace)
        return self._point(name, outline, None, pinned=False, watched=watched)

    def publish(
        self,
        name: str,
        loaded: LoadedAdapter,
        *,
        load_inplace: bool,
        pinned: bool = False,
        watched: bool = False,
        caller: Caller | None = None,
    ) -> AdapterRecord:
        """Point a name at an adapter: new content is a new version, the same content is not.

        Raises:
            InvalidRequest: as `check_name`, or if no more can be pinned.
            Forbidden: if the caller may hold no more.
        """
        self.check_name(name, load_inplace=load_inplace)
        outline = loaded.facts.outline
        return self._point(name, outline, loaded, pinned=pinned, watched=watched, caller=caller)

    def unread(self, name: str, request_id: str) -> Version | None:
        """Return the version to read before `resolve` can answer, if any.

        One without a digest is to be `complete`d, one with a digest to be `restore`d.

        Raises:
            NotFound: if there is no such name.
        """
        version = self._history(name).pick(request_id)
        is_read = version.digest is not None and not self._contents.is_outdated(version.digest)
        return None if is_read else version

    def complete(self, loaded: LoadedAdapter) -> None:
        """Learn the digests of all versions whose directory has been read for the first time."""
        facts = loaded.facts
        for name, number in tuple(self._unread.get(facts.outline.source.path, ())):
            history = self._names[name]
            next_number = self._last_numbers[name] + 1
            after = history.complete(number, facts.outline, facts.digest, next_number)
            self._change(name, after, {facts.digest: loaded})

    def resolve(self, name: str, request_id: str) -> ResolvedAdapter:
        """Return what one request gets for a name; nothing of it is `unread`.

        Raises:
            NotFound: if there is no such name.
        """
        version = self._history(name).pick(request_id)
        assert version.digest is not None, f"{name} must be completed first"
        facts = self._contents.facts(version.digest)
        return ResolvedAdapter(
            name,
            version.number,
            version.digest,
            facts.device_bytes,
            facts.stands_alone,
            facts.outline.classifier,
        )

    def record(self, name: str) -> AdapterRecord:
        """Return what is known of a name.

        Raises:
            NotFound: if there is no such name.
        """
        return adapter_record(self._history(name), self._contents)

    def records(self) -> tuple[AdapterRecord, ...]:
        """Return the whole catalogue, ordered by name."""
        return tuple(self.record(name) for name in sorted(self._names))

    def history(self, name: str) -> History | None:
        """Return the versions of a name, if there is one."""
        return self._names.get(name)

    def unload(self, name: str) -> History:
        """Take a name out of the catalogue and return what it was.

        Raises:
            NotFound: if there is no such name.
        """
        if name not in self._names:
            raise adapter_not_found(name)
        history = self._names[name]
        self._change(name, None, {})
        return history

    def rollback_target(self, name: str, number: int | None) -> Version:
        """Return the version that `rollback` would go back to, to see that it can be had.

        Raises:
            NotFound: if there is no such name.
            Conflict: if the version is not kept.
        """
        history = self._history(name)
        version = history.get(history.rollback_target(number))
        assert version is not None, "a target is kept"
        return version

    def rollback(self, name: str, number: int, loaded: dict[str, LoadedAdapter]) -> AdapterRecord:
        """Give all requests to a kept version; `loaded` is what was read for it, by digest.

        Raises:
            NotFound, Conflict: as `rollback_target`.
            InvalidRequest: if the name is pinned and no more can be.
        """
        history = self._history(name)
        self._change(name, history.rollback(history.rollback_target(number)), loaded)
        return self.record(name)

    def split_targets(self, name: str, shares: dict[int, int]) -> tuple[Version, ...]:
        """Return the versions that `split` would give requests to.

        Raises:
            NotFound: if there is no such name.
            InvalidRequest: if the shares do not sum to 100.
            Conflict: if a version is not kept.
        """
        return self._history(name).split(shares).active

    def split(
        self, name: str, shares: dict[int, int], loaded: dict[str, LoadedAdapter]
    ) -> AdapterRecord:
        """Give shares of the requests, in percent, to versions; as `rollback` otherwise."""
        self._change(name, self._history(name).split(shares), loaded)
        return self.record(name)

    def pin_targets(self, name: str) -> tuple[Version, ...]:
        """Return the versions that `pin` would keep in memory.

        Raises:
            NotFound: if there is no such name.
        """
        return self._history(name).active

    def pin(
        self, name: str, loaded: dict[str, LoadedAdapter], caller: Caller | None = None
    ) -> AdapterRecord:
        """Pin a name, versions and shares as they are; `loaded` as for `rollback`.

        Raises:
            NotFound: if there is no such name.
            InvalidRequest: if no more can be pinned.
            Forbidden: if the caller may pin no more.
        """
        history = self._history(name)
        is_new = caller is not None and not history.pinned
        by = caller.owner if caller is not None and is_new else history.pinned_by
        self._change(name, replace(history, pinned=True, pinned_by=by), loaded, caller)
        return self.record(name)

    def unpin(self, name: str) -> AdapterRecord:
        """Take a name's pin away; raises NotFound as `pin`."""
        self._change(name, replace(self._history(name), pinned=False, pinned_by=None), {})
        return self.record(name)

    # Content, whatever names point at it.

    def missing(self, digest: str) -> tuple[Source, ...]:
        """Return where to read content before `take` can answer; nothing: it is in host memory.

        Raises:
            NotFound: if the content is not known (any more).
        """
        return self._contents.missing(digest)

    def restore(self, loaded: LoadedAdapter) -> None:
        """Bring content back from disk; one that was forgotten meanwhile is not wanted back."""
        self._contents.restore(loaded)

    def take(self, digest: str) -> Shards:
        """Return content that is in host memory, as the one used last.

        Raises:
            NotFound: if the content is not known (any more).
        """
        return self._contents.take(digest)

    def pinned(self) -> tuple[Facts, ...]:
        """Return what must keep its device slot, ordered by digest."""
        return self._contents.pinned()

    @property
    def num_pin_changes(self) -> int:
        """How often `pinned` has changed."""
        return self._contents.num_pin_changes

    def retired(self) -> dict[str, int]:
        """Return the content that no version points at, with the number of its retirement."""
        return self._contents.retired()

    def retirement(self, digest: str) -> int | None:
        """Return the number of a retirement that no version has ended; each has its own."""
        return self._contents.retirement(digest)

    def forget(self, digest: str) -> int:
        """Free the host memory of retired content and return how many bytes it was."""
        return self._contents.forget(digest)

    # What outlives the process.

    def note_changes(self, note: Callable[[str], None]) -> None:
        """Have `note` called with each entry of a SavedState that changes from now on."""
        self._note = note
        self._contents.note_changes(note)

    def note_released(self, on_release: Callable[[str], None]) -> None:
        """Have `on_release` called with each directory that something reads no more."""
        self._contents.note_released(on_release)

    def uses(self, path: str) -> bool:
        """Tell whether a version, or content that requests run on, is read from a directory."""
        return path in self._unread or self._contents.uses(path)

    def last_number(self, name: str) -> int:
        """Return the number of the newest version that a name has ever had; 0: none."""
        return self._last_numbers.get(name, 0)

    def facts(self, digest: str) -> Facts:
        """Return what is known of content that a version holds, or that is retired."""
        return self._contents.facts(digest)

    def bring_back(self, name: str, last_number: int, history: History | None) -> None:
        """Take in a name as it was; the content of its versions has been brought back before.

        Raises:
            InvalidRequest: if it is the base model's name by now, or no more can be pinned.
        """
        check_name_form(name, self._base_name)
        if history is not None:
            self._change(name, history, {})
        self._last_numbers[name] = last_number

    def bring_back_content(self, facts: Facts) -> None:
        """Know content without having read it; it is retired until a version holds it."""
        self._contents.bring_back(facts)

    def is_outdated(self, digest: str) -> bool:
        """Tell whether content must be read before its sizes can be relied on."""
        return self._contents.is_outdated(digest)

    def set_layout(self, layout: str) -> None:
        """Say how adapters are cut now: sizes of content that was cut otherwise are outdated."""
        self._contents.layout = layout

    def check(self) -> None:
        """Assert that names, contents and host tier agree."""
        self._contents.check(
            {
                (history.name, version.number): version
                for history in self._names.values()
                for version in history.versions
            },
            [history.pinned_digests for history in self._names.values()],
        )
        self._holdings.check(self._names.values())
        unread = {
            (history.name, version.number)
            for history in self._names.values()
            for version in history.versions
            if version.digest is None
        }
        assert unread == {key for keys in self._unread.values() for key in keys}, "unread is wrong"
        for name, history in self._names.items():
            assert name == history.name, f"{name} is filed wrongly"
            assert sum(history.shares.values()) == 100, f"shares of {name}: {history.shares}"
            assert all(history.get(number) for number in history.shares), f"{name} is split badly"
            assert history.versions[-1].number <= self._last_numbers[name], f"{name} counts down"

    def _history(self, name: str) -> History:
        if name not in self._names:
            raise NotFound(f"The model {shown(name)} does not exist.", "model", "model_not_found")
        return self._names[name]

    def _point(
        self,
        name: str,
        outline: Outline,
        loaded: LoadedAdapter | None,
        *,
        pinned: bool,
        watched: bool,
        caller: Caller | None = None,
    ) -> AdapterRecord:
        """Publish or register under a name that has been checked."""
        digest = None if loaded is None else loaded.facts.digest
        number = self._last_numbers.get(name, 0) + 1
        before = self._names.get(name)
        if before is None:
            after = first(name, number, outline, digest, pinned=pinned, watched=watched)
        else:
            after = before.publish(number, outline, digest, pinned=pinned, watched=watched)
        owner = None if caller is None else caller.owner
        pinned_by = (owner or after.pinned_by) if pinned else None
        after = replace(after, owner=owner, pinned_by=pinned_by)
        self._change(name, after, {} if loaded is None else {loaded.facts.digest: loaded}, caller)
        return self.record(name)

    def _change(
        self,
        name: str,
        after: History | None,
        loaded: dict[str, LoadedAdapter],
        caller: Caller | None = None,
    ) -> None:
        """Let a name stand for something else, or for nothing; all or nothing happens.

        What a `caller` changes must be within what that one may hold.
        """
        before = self._names.get(name)
        wanted = after.digests if after is not None else frozenset()
        used = {digest: one for digest, one in loaded.items() if digest in wanted}
        if after is not None and caller is not None:
            self._holdings.check_change(after, caller, partial(self._host_bytes, used))
        self._contents.change(name, before, after, used)
        self._holdings.change(before, after)
        self._note(name_entry(name))
        for version in before.versions if before is not None else ():
            self._mark_read(name, version)
        if after is None:
            del self._names[name]
            return
        self._names[name] = after
        newest = after.versions[-1].number
        self._last_numbers[name] = max(newest, self._last_numbers.get(name, 0))
        for version in after.versions:
            if version.digest is None:
                path = version.outline.source.path
                self._unread.setdefault(path, {})[name, version.number] = None

    def _host_bytes(self, loaded: dict[str, LoadedAdapter], digest: str) -> int:
        """Return what content takes of host memory, of what was just read as well."""
        facts = loaded[digest].facts if digest in loaded else self._contents.facts(digest)
        return facts.host_bytes

    def _mark_read(self, name: str, version: Version) -> None:
        path = version.outline.source.path
        if version.digest is None:
            del self._unread[path][name, version.number]
            if not self._unread[path]:
                del self._unread[path]
