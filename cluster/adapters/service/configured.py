"""Keeps the catalogue in step with the operator's configuration, which may change while serving.

What calls have loaded or unloaded stays as they left it, unless the configuration says something
new of that name.
"""

import asyncio
import logging
from pathlib import Path

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.peft.strict_json import shown
from cluster.adapters.records import Source
from cluster.adapters.service.directory_watcher import DirectoryWatcher, NameLocks
from cluster.adapters.service.read_threads import ReadThreads
from cluster.errors import TopworkError

logger = logging.getLogger("topwork.pool")


class ConfiguredAdapters:
    """Adapters that the configuration names, and directories of more of them.

    `interval`: seconds between two looks at the directories.
    """

    def __init__(
        self,
        catalog: AdapterCatalog,
        threads: ReadThreads,
        locks: NameLocks,
        watcher: DirectoryWatcher,
        interval: float,
    ) -> None:
        self._refused: dict[str, str] = {}  # why an entry is not served, by name
        self._watcher = watcher
        self._interval = interval
        self._watching: asyncio.Task[None] | None = None
        self._catalog = catalog
        self._threads = threads
        self._locks = locks
        self._configured: dict[str, str] = {}

    async def start(self, adapters: dict[str, str]) -> None:
        """Register all adapters, directory by name; only what tells whether they fit is read.

        Raises:
            TopworkError: if one of them fails a check; the message names it.
        """
        for name, path in adapters.items():
            try:
                self._catalog.check_name(name, load_inplace=False)
                self._catalog.register(name, await self._threads.outline(_source(path)))
            except TopworkError as error:
                raise type(error)(f"adapter {shown(name)}: {error}", error.param) from None
        self._configured = dict(adapters)
        await self._poll_directories()

    @property
    def refused(self) -> dict[str, str]:
        """Why an adapter is not served, by name."""
        return self._watcher.refused | self._refused

    async def close(self) -> None:
        """Stop looking at directories."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def follow(self, adapters: dict[str, str]) -> None:
        """Take in what is new or changed in the configuration; let go of what has left it.

        An entry that fails a check is refused and leaves the others, and what its name stood for,
        as they are: those are being served.
        """
        before, self._configured = self._configured, dict(adapters)
        for name in sorted(before.keys() - adapters.keys()):
            self._refused.pop(name, None)
            if self._is_as_configured(name, before[name]):
                self._catalog.unload(name)
        for name, path in adapters.items():
            if before.get(name) == path and not self._is_as_configured(name, path):
                continue  # a call has changed it since
            try:
                async with self._locks.of(name):
                    await self._take(name, path)
                self._refused.pop(name, None)
            except TopworkError as error:
                self._refused[name] = error.message
                logger.warning("adapter %s of the configuration is not served: %s", name, error)
        await self._poll_directories()

    async def _poll_directories(self) -> None:
        """Look at adapter directories now, and at intervals from the first one on."""
        await self._watcher.poll()
        if self._watching is None and self._watcher.is_watching:
            self._watching = asyncio.create_task(self._watcher.run(self._interval))

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
            return
        elif history.current.digest is None:  # its content was never read
            self._catalog.register(name, outline, load_inplace=True)
        else:
            loaded = await self._threads.whole(source)
            self._catalog.publish(name, loaded, load_inplace=True, pinned=history.pinned)


def _source(path: str) -> Source:
    return Source(str(Path(path).absolute()))
