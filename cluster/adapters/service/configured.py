"""Keeps the catalogue in step with the operator's configuration, which may change while serving.

What calls have loaded or unloaded stays as they left it, unless the configuration says something
new of that name.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.records import Source
from cluster.adapters.saved_state import configured_entry
from cluster.adapters.service.directory_watcher import DirectoryWatcher, NameLocks
from cluster.adapters.service.read_threads import ReadThreads
from cluster.errors import TopworkError
from cluster.supervision import supervise

logger = logging.getLogger("topwork.pool")

TASK = "adapter_directories"


class ConfiguredAdapters:
    """Adapters that the configuration names, and directories of more of them.

    `interval`: seconds between two looks at the directories; `on_failure` counts tasks that fail.
    """

    def __init__(
        self,
        catalog: AdapterCatalog,
        threads: ReadThreads,
        locks: NameLocks,
        watcher: DirectoryWatcher,
        interval: float,
        on_failure: Callable[[str], None],
    ) -> None:
        self._refused: dict[str, str] = {}  # why an entry is not served, by name
        self._watcher = watcher
        self._interval = interval
        self._on_failure = on_failure
        self._watching: asyncio.Task[None] | None = None
        self._catalog = catalog
        self._threads = threads
        self._locks = locks
        self._configured: dict[str, str] = {}  # what was taken in
        self._note: Callable[[str], None] = lambda entry: None

    @property
    def refused(self) -> dict[str, str]:
        """Why an adapter is not served, by name."""
        return self._watcher.refused | self._refused

    async def close(self) -> None:
        """Stop looking at directories."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def start(self, adapters: dict[str, str], *, is_restart: bool) -> None:
        """Do as `follow`, but end where something new cannot be served.

        Only what tells whether they fit is read. In a restart the directories that were served
        before are looked at in the background.

        Raises:
            TopworkError: if one of them fails a check; the message names it.
        """
        await self._follow(adapters, is_strict=True)
        await self._poll_directories(is_restart=is_restart)

    async def follow(self, adapters: dict[str, str], *, is_restart: bool) -> None:
        """Take in what is new or changed in the configuration; let go of what has left it.

        An entry that fails a check is refused and leaves the others, and what its name stood for,
        as they are: those are being served.
        """
        await self._follow(adapters, is_strict=False)
        await self._poll_directories(is_restart=is_restart)

    def note_changes(self, note: Callable[[str], None]) -> None:
        """Have `note` called with each entry of a SavedState that changes from now on."""
        self._note = note

    def saved(self, name: str) -> str | None:
        """Return what is to be saved of an entry that has been taken in, if it has."""
        return self._configured.get(name)

    def bring_back(self, configured: dict[str, str]) -> None:
        """Take in what was saved: directories by name."""
        self._configured = dict(configured)

    async def _follow(self, adapters: dict[str, str], *, is_strict: bool) -> None:
        for name in sorted(self._configured.keys() - adapters.keys()):
            self._refused.pop(name, None)
            if self._is_as_configured(name, self._configured[name]):
                self._catalog.unload(name)
            del self._configured[name]
            self._note(configured_entry(name))
        for name in [name for name in self._refused if name not in adapters]:
            del self._refused[name]
        for name, path in adapters.items():
            is_known = self._configured.get(name) == path
            if is_known and not self._is_as_configured(name, path):
                continue  # a call has changed it since
            try:
                async with self._locks.of(name):
                    await self._take(name, path)
                self._refused.pop(name, None)
            except TopworkError as error:
                if is_strict and not is_known:
                    raise type(error)(f"adapter {shown(name)}: {error}", error.param) from None
                self._refused[name] = error.message
                logger.warning("adapter %s of the configuration is not served: %s", name, error)

    async def _poll_directories(self, *, is_restart: bool) -> None:
        """Look at adapter directories now, and at intervals from the first one on."""
        if not is_restart:
            await self._watcher.poll()
        if self._watching is None and self._watcher.is_watching:
            delay = 0.0 if is_restart else self._interval
            self._watching = asyncio.create_task(
                supervise(
                    TASK,
                    lambda: self._watcher.run(self._interval, delay),
                    self._on_failure,
                )
            )

    def _is_as_configured(self, name: str, path: str) -> bool:
        """Tell whether a name stands for what the configuration says, and nothing else."""
        history = self._catalog.history(name)
        return (
            history is not None
            and not history.watched
            and history.current.outline.source == _source(path)
        )

    async def _take(self, name: str, path: str) -> None:
        """Register a directory, or publish it under a name that stands for something else."""
        source = _source(path)
        outline = await self._threads.outline(source)
        history = self._catalog.history(name)
        if history is None:
            self._catalog.register(name, outline)
        elif history.current.outline == outline:
            pass
        elif history.current.digest is None:  # its content was never read
            self._catalog.register(name, outline, load_inplace=True)
        else:
            loaded = await self._threads.whole(source)
            self._catalog.publish(name, loaded, load_inplace=True, pinned=history.pinned)
        # No await between the two: they are saved together.
        if self._configured.get(name) != path:
            self._configured[name] = path
            self._note(configured_entry(name))


def _source(path: str) -> Source:
    return Source(str(Path(path).absolute()))
