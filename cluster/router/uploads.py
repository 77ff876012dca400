"""Hands the body of a call on to the adapter pool while it comes, a piece at a time.

A router holds one piece of an upload and what the network brings meanwhile, never the whole.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from cluster.adapters.records import AdapterRecord, LoadOptions
from cluster.errors import Unavailable
from cluster.router.backend import Backend

logger = logging.getLogger("topwork.router")

PIECE_BYTES = 4 << 20  # most adapters come in one or two: each is a call to the pool
ABORT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What is said of an upload beside its weights."""

    num_bytes: int | None = None  # that are announced
    config: bytes | None = None  # adapter_config.json; None: in the header of the weights
    options: LoadOptions = field(default_factory=LoadOptions)


async def send(
    backend: Backend, name: str, parts: AsyncIterator[bytes], upload: Upload
) -> AdapterRecord:
    """Return the record of a name that stands for what has come; nothing is left if this fails.

    Raises:
        InvalidRequest, InvalidAdapter, Overloaded, Unavailable: as the Backend does.
    """
    options = upload.options
    upload_id = await backend.begin_upload(
        name, options.load_inplace, upload.num_bytes, options.caller
    )
    try:
        offset = 0
        async for piece in pieces(parts):
            await backend.upload_piece(upload_id, offset, piece)
            offset += len(piece)
        return await backend.finish_upload(upload_id, name, upload.config, options)
    except BaseException:  # also when the caller goes away
        aborting = asyncio.ensure_future(backend.abort_upload(upload_id))
        aborting.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A pool that has gone deletes it when it comes back; nobody waits for that.
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await asyncio.shield(aborting)
        raise


async def pieces(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what comes in pieces of at least PIECE_BYTES, but for the last."""
    piece = bytearray()
    async for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)
