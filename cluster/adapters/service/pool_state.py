"""The state of the pool that outlives its process: taken in at the start, saved as it changes.

What that is: names with their versions, shares and pins, content that requests may still run on,
what has been dealt with of directories and configuration, and whether the cluster is drained.
Content is known by its digest, and read again when it is asked for.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.records import Outline, Source
from cluster.adapters.saved_state import (
    DRAINED,
    SERVER,
    SavedContent,
    SavedName,
    SavedState,
    SavedVersion,
    decode,
    facts_of,
    name_entry,
    sizes_of,
)
from cluster.adapters.service.configured import ConfiguredAdapters
from cluster.adapters.service.directory_watcher import DirectoryWatcher
from cluster.adapters.service.state_writer import StateWriter
from cluster.adapters.service.store import AdapterStore
from cluster.adapters.sources.staged import StagedAdapters
from cluster.adapters.state_file import StateError, StateFile, StateLocked
from cluster.adapters.versions import History, Version
from cluster.errors import InvalidRequest, Replaced, TopworkError, Unavailable
from cluster.supervision import supervise

logger = logging.getLogger("topwork.pool")

LOCK_TIMEOUT = 15.0  # seconds until a process before this one must have ended
LOCK_INTERVAL = 0.05
TASK = "adapter_state"


class StateInUse(Unavailable):
    """Another pool has the file: the same call may be made again when that one has ended."""


class PoolState:
    """Keeps a file, or nothing if there is no `path`; `on_failure` counts tasks that fail.

    `server` names the server that this pool is of, one after the other.
    """

    def __init__(
        self,
        path: str | None,
        server: str,
        catalog: AdapterCatalog,
        store: AdapterStore,
        staged: StagedAdapters,
        watcher: DirectoryWatcher,
        configured: ConfiguredAdapters,
        on_failure: Callable[[str], None],
    ) -> None:
        self.is_drained = False  # which ends with the server
        self.is_of_same_server = False  # which had started before this pool began
        self.writer: StateWriter | None = None
        self._is_ending = False
        self._own_paths: set[str] = set()  # that the configuration named
        self._path = path
        self._server = server
        self._catalog = catalog
        self._store = store
        self._staged = staged
        self._watcher = watcher
        self._configured = configured
        self._on_failure = on_failure
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def check_open(self) -> None:
        """Raise Unavailable if the file has not been read yet, Replaced from `end` on."""
        if self._is_ending:
            raise Replaced("the adapter pool is replaced", retry_after=1)
        if self._path is not None and self.writer is None:
            raise Unavailable("the adapter pool is reading its state", retry_after=1)

    async def open(self, roots: tuple[str, ...]) -> bool:
        """Read the file, once; return whether it has brought anything back.

        `roots` are those of adapters that calls have loaded.

        Raises:
            StateInUse: if another pool has it and does not end.
            Unavailable: with the reason, if it cannot be used.
        """
        if self._path is None or self.writer is not None:
            return False
        try:
            file = await _open(Path(self._path))
            try:
                state = await asyncio.to_thread(decode, file.entries)
            except StateError:
                file.close()
                raise
        except StateLocked as error:
            raise StateInUse(str(error)) from error
        except StateError as error:
            raise Unavailable(str(error)) from error
        refreshed = await self._bring_back(state, roots)
        self.writer = writer = StateWriter(file, self._value)
        self._catalog.note_changes(writer.note)
        self._watcher.changes.note_changes(writer.note)
        self._configured.note_changes(writer.note)
        for name in refreshed:
            writer.note(name_entry(name))
        self._tasks = (
            asyncio.create_task(supervise(TASK, writer.run, self._on_failure)),
            asyncio.create_task(self._read_pinned()),
        )
        return bool(state.names or state.directories)

    async def has_started(self) -> None:
        """Save that the server has started with what it was given, if it had not before.

        Raises:
            Unavailable: if that, or what has changed before, cannot be saved.
        """
        if self.writer is not None and not self.is_of_same_server:
            self.is_of_same_server = True
            self.writer.note(SERVER)
            self.writer.note(DRAINED)
        await self.saved()

    async def drain(self, *, is_drained: bool) -> None:
        """Begin or end a drain.

        Raises:
            Unavailable: if that is in force, but not saved.
        """
        self.is_drained = is_drained
        if self.writer is not None:
            self.writer.note(DRAINED)
            await self.writer.saved()

    async def saved(self) -> None:
        """Wait until all that has changed is saved.

        Raises:
            Unavailable: if it cannot be.
        """
        if self.writer is not None:
            await self.writer.saved()

    async def settled(self, entry: str | None = None) -> None:
        """Wait until what is to be told is saved; a disk that refuses keeps nobody from it."""
        if self.writer is not None:
            try:
                await self.writer.saved(entry)
            except Unavailable as error:
                logger.debug("told before it is saved: %s", error)

    def end(self) -> None:
        """Refuse what comes from now on: the pool after this one has the file then."""
        self._is_ending = True

    async def close(self) -> None:
        """Let go of the file."""
        self.end()
        writer, self.writer = self.writer, None
        if writer is not None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await writer.close()

    async def _bring_back(self, state: SavedState, roots: tuple[str, ...]) -> list[str]:
        """Take in what was saved; return the names of which more is known now."""
        self.is_of_same_server = state.server == self._server
        self.is_drained = state.is_drained and self.is_of_same_server
        self._configured.bring_back(state.configured)
        self._own_paths = {str(Path(path).absolute()) for path in state.configured.values()}
        for name, directory in state.directories.items():
            self._watcher.changes.bring_back(name, directory)
        for digest, content in state.contents.items():
            outline = self._moved(content.outline, roots)
            self._catalog.bring_back_content(facts_of(digest, outline, content.sizes))
        for name, saved in sorted(state.names.items()):
            try:
                self._bring_back_name(name, saved, roots)
            except InvalidRequest as error:
                logger.warning("%s was loaded and is not served any more: %s", name, error)
        pinned = [name for name, saved in sorted(state.names.items()) if saved.pinned]
        return [name for name in pinned if name in self._catalog and await self._pin(name)]

    def _bring_back_name(self, name: str, saved: SavedName, roots: tuple[str, ...]) -> None:
        self._catalog.check_name(name, load_inplace=True)
        versions = []
        for version in saved.versions:
            outline = self._moved(version.outline, roots)
            versions.append(Version(version.number, outline, version.digest))
            if version.digest is not None and version.sizes is not None:
                facts = facts_of(version.digest, outline, version.sizes)
                self._catalog.bring_back_content(facts)
        history = None
        if versions:
            history = History(
                name,
                tuple(versions),
                saved.shares,
                pinned=False,
                watched=saved.watched,
                owner=saved.owner,
                pinned_by=saved.pinned_by,
            )
        self._catalog.bring_back(name, saved.last_number, history)

    def _moved(self, outline: Outline, roots: tuple[str, ...]) -> Outline:
        """Return an outline whose directory is read within what confines it now."""
        path = outline.source.path
        self._store.expect(path)
        if self._staged.holds(path):
            return structs.replace(outline, source=self._staged.source(path))
        if Source(path) == outline.source and path in self._own_paths:
            roots = ()  # the configuration names it
        else:
            roots = self._watcher.roots_of(os.path.dirname(path)) or roots
        return structs.replace(outline, source=Source(path, roots))

    async def _pin(self, name: str) -> bool:
        """Pin a name again, if that is possible still; return whether it was read for that."""
        history = self._catalog.history(name)
        assert history is not None, "it has been brought back"
        is_read = False
        try:
            for version in history.active:
                if version.digest is not None and self._catalog.is_outdated(version.digest):
                    await self._store.take(version.digest)  # for its sizes
                    is_read = True
            self._catalog.pin(name, {})
        except TopworkError as error:
            logger.warning("%s was pinned and is not any more: %s", name, error)
            return False
        return is_read

    async def _read_pinned(self) -> None:
        """Bring back to memory what is pinned; what cannot be read is read when it is used."""
        for facts in self._catalog.pinned():
            with contextlib.suppress(TopworkError):
                await self._store.take(facts.digest)

    def _value(self, entry: str) -> object:
        """Return what is to be saved of an entry now, None if there is nothing."""
        kind, _, key = entry.partition("/")
        match kind:
            case "name":
                return self._saved_name(key)
            case "content":
                return self._saved_content(key)
            case "directory":
                return self._watcher.changes.saved(key)
            case "configured":
                return self._configured.saved(key)
            case _:
                return self._server if entry == SERVER else self.is_drained or None

    def _saved_name(self, name: str) -> SavedName:
        history, number = self._catalog.history(name), self._catalog.last_number(name)
        if history is None:
            return SavedName(number)
        versions = []
        for version in history.versions:
            digest = version.digest
            sizes = None if digest is None else sizes_of(self._catalog.facts(digest))
            versions.append(SavedVersion(version.number, version.outline, digest, sizes))
        return SavedName(
            number,
            tuple(versions),
            history.shares,
            history.pinned,
            history.watched,
            history.owner,
            history.pinned_by,
        )

    def _saved_content(self, digest: str) -> SavedContent | None:
        if self._catalog.retirement(digest) is None:
            return None
        facts = self._catalog.facts(digest)
        return SavedContent(facts.outline, sizes_of(facts))


async def _open(path: Path) -> StateFile:
    """Open the file as soon as a process that had it before has ended.

    Raises:
        StateError: if it cannot be used, or is never let go.
    """
    deadline = asyncio.get_running_loop().time() + LOCK_TIMEOUT
    while True:
        try:
            return await asyncio.to_thread(StateFile, path)
        except StateLocked:
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(LOCK_INTERVAL)
