"""Adapters that callers send in pieces, each over its own router.

A router that dies sends nothing more: what it left is deleted when no piece has come for a while.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from cluster.adapters.peft.safetensors_file import MAX_HEADER_BYTES
from cluster.adapters.peft.strict_json import parse_object
from cluster.adapters.sources.staged import StagedAdapters
from cluster.adapters.sources.staging import Incoming, check_size
from cluster.errors import InvalidAdapter, Overloaded, Unavailable

MAX_UPLOADS = 8  # at a time
IDLE_SECONDS = 60.0  # without a piece
METADATA_KEY = "adapter_config"  # in the header of a safetensors file


class Run(Protocol):
    """Does what blocks away from the event loop."""

    async def __call__(self, work: Callable[[], None]) -> None:
        """Return when it is done; raises as `work` does."""
        ...


class _Upload:
    """What has come of one adapter."""

    def __init__(self, incoming: Incoming) -> None:
        self.incoming = incoming
        self.lock = asyncio.Lock()
        self.timer: asyncio.TimerHandle | None = None


class Uploads:
    """All that are under way; `max_bytes` is of the weights of one.

    `run` does what blocks in a thread that leaves the cores to the ranks.
    """

    def __init__(self, staged: StagedAdapters, max_bytes: int, run: Run) -> None:
        self._run = run
        self._staged = staged
        self._max_bytes = max_bytes
        self._uploads: dict[str, _Upload] = {}
        self._num_reserved = 0
        self._ends: set[asyncio.Task[None]] = set()

    async def begin(self, num_bytes: int | None) -> str:
        """Return the id of a new upload, of which `num_bytes` are said to come.

        Raises:
            InvalidRequest: if there is no folder for it.
            InvalidAdapter: if that is too much.
            Overloaded: if too many are under way.
            Unavailable: if the disk refuses.
        """
        check_size(num_bytes or 0, self._max_bytes)
        if len(self._uploads) + self._num_reserved >= MAX_UPLOADS:
            raise Overloaded(
                f"{MAX_UPLOADS} uploads of adapters are under way, which is the limit",
                retry_after=1,
            )
        self._num_reserved += 1
        try:
            incoming = await self._staged.begin(self._max_bytes, num_bytes or 0)
        finally:
            self._num_reserved -= 1
        upload_id = secrets.token_hex(16)
        self._uploads[upload_id] = _Upload(incoming)
        self._touch(upload_id)
        return upload_id

    async def write(self, upload_id: str, offset: int, data: bytes) -> None:
        """Take in a piece, which is to follow the one before.

        Raises:
            InvalidAdapter: if that is too much.
            Unavailable: if the upload is not known (any more), or the disk refuses.
        """
        upload = self._known(upload_id)
        async with upload.lock:
            self._touch(upload_id)
            if offset != upload.incoming.num_bytes:
                raise _lost("a piece of it is missing")
            await self._run(lambda: upload.incoming.write(data))

    async def fill(self, upload_id: str, work: Callable[[Callable[[bytes], None]], None]) -> None:
        """Have `work` write all of an upload, in a thread; raises as it does, or as `write`."""
        upload = self._known(upload_id)
        async with upload.lock:
            await self._run(lambda: work(upload.incoming.write))
            self._touch(upload_id)

    @asynccontextmanager
    async def finished(
        self, upload_id: str, config: bytes | None, checksum: str | None
    ) -> AsyncIterator[Incoming]:
        """Have an upload whole and on the disk; without `config` it is in the header.

        Raises:
            InvalidAdapter: if it has no configuration, or another checksum.
            Unavailable: if it is not known (any more), or the disk refuses.
        """
        upload = self._known(upload_id)
        self._forget(upload_id)
        try:
            async with upload.lock:
                await self._run(lambda: seal(upload.incoming, config, checksum))
            yield upload.incoming
        finally:
            await self._run(upload.incoming.discard)

    async def abort(self, upload_id: str) -> None:
        """Delete what has come; nothing if it is not known (any more)."""
        upload = self._uploads.get(upload_id)
        if upload is not None:
            self._forget(upload_id)
            async with upload.lock:
                await self._run(upload.incoming.discard)

    async def close(self) -> None:
        """Delete all."""
        for upload_id in list(self._uploads):
            await self.abort(upload_id)
        await asyncio.gather(*self._ends)

    def _known(self, upload_id: str) -> _Upload:
        if upload_id not in self._uploads:
            raise _lost(
                f"the adapter pool has restarted, or no byte has come for {IDLE_SECONDS:g} s"
            )
        return self._uploads[upload_id]

    def _forget(self, upload_id: str) -> None:
        timer = self._uploads.pop(upload_id).timer
        assert timer is not None, "it was touched"
        timer.cancel()

    def _touch(self, upload_id: str) -> None:
        upload = self._uploads.get(upload_id)
        if upload is None:
            return
        if upload.timer is not None:
            upload.timer.cancel()
        loop = asyncio.get_running_loop()
        upload.timer = loop.call_later(IDLE_SECONDS, self._give_up, upload_id)

    def _give_up(self, upload_id: str) -> None:
        task = asyncio.create_task(self.abort(upload_id))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)


def seal(incoming: Incoming, config: bytes | None, checksum: str | None) -> None:
    """Seal what has come; without `config` it is in the header of the weights. Blocks.

    Raises:
        InvalidAdapter: if there is no configuration, or it has another checksum.
        Unavailable: if the disk refuses.
    """
    incoming.seal(_config_in(incoming) if config is None else config, checksum)


def _config_in(incoming: Incoming) -> bytes:
    """Return the configuration that the weights carry in their header's metadata."""
    size = int.from_bytes(incoming.head(8), "little")
    if incoming.num_bytes < 8 or size > min(MAX_HEADER_BYTES, incoming.num_bytes - 8):
        raise InvalidAdapter("the body is not a safetensors file, or only a part of one")
    header = parse_object(incoming.head(8 + size)[8:], "the safetensors header")
    metadata = header.get("__metadata__")
    config = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(config, str):
        raise InvalidAdapter(
            "the adapter's configuration is missing: send adapter_config.json in the header "
            f"X-Adapter-Config, or as the text {METADATA_KEY} of the safetensors metadata"
        )
    return config.encode()


def _lost(reason: str) -> Unavailable:
    return Unavailable(f"the upload was lost ({reason}): send it again", retry_after=1)
