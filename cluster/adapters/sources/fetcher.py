"""Fetches adapters from hubs, buckets and hosts into the staging folder, and nothing else.

Only the two files of an adapter are asked for, of bounded size and in bounded time, and only from
where the operator allows it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager

from cluster.adapters.peft.checks import CONFIG, MAX_CONFIG_BYTES, PARAM, WEIGHTS
from cluster.adapters.sources import hub
from cluster.adapters.sources.allow_list import BUCKETS, HUB, Address, AllowList
from cluster.adapters.sources.buckets import open_bucket
from cluster.adapters.sources.staged import StagedAdapters
from cluster.adapters.sources.staging import Incoming
from cluster.adapters.sources.web import open_web
from cluster.errors import InvalidAdapter, Overloaded, Unavailable

logger = logging.getLogger("topwork.pool")

FETCH_SECONDS = 900.0  # that one adapter may take
MAX_FETCHES = 4  # at a time
MAX_WAITING = 32

Open = Callable[[Address, str], AbstractContextManager[Iterator[bytes]]]


class Fetcher:
    """What `allowed` covers; `max_bytes` is of the weights of one adapter."""

    def __init__(self, allowed: AllowList, staged: StagedAdapters, max_bytes: int) -> None:
        self._allowed = allowed
        self._staged = staged
        self._max_bytes = max_bytes
        self._num_fetches = 0  # under way or waiting
        # Apart from those that read directories: a slow host holds nobody else up.
        self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="fetch")

    def address(self, path: str) -> Address | None:
        """Return where a path leads; None if it is one on this host.

        Raises:
            InvalidRequest: if it leads to where nothing may be fetched from.
        """
        return self._allowed.address(path)

    @asynccontextmanager
    async def fetched(self, address: Address, checksum: str | None) -> AsyncIterator[Incoming]:
        """Have an adapter whole and on the disk; `checksum` is what its weights must have.

        Raises:
            NotFound: if there is none.
            InvalidRequest: if it cannot be had from there.
            InvalidAdapter: if it is too large or has another checksum.
            Overloaded: if too many are being fetched.
            Unavailable: if the host does not answer, or the disk refuses.
        """
        if self._num_fetches >= MAX_FETCHES + MAX_WAITING:
            raise Overloaded(
                f"{self._num_fetches} adapters are being fetched, which is the limit", retry_after=5
            )
        self._num_fetches += 1
        try:
            incoming = await self._staged.begin(self._max_bytes)
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(
                    self._threads, lambda: _fetch(address, incoming, checksum)
                )
                yield incoming
            finally:
                await asyncio.to_thread(incoming.discard)
        finally:
            self._num_fetches -= 1

    def close(self) -> None:
        """Begin nothing more; what is under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _fetch(address: Address, incoming: Incoming, checksum: str | None) -> None:
    deadline = time.monotonic() + FETCH_SECONDS
    open_file: Open = open_web
    if address.scheme == HUB:
        address = hub.resolve(address)
        open_file = hub.open_hub
    elif address.scheme in BUCKETS:
        open_file = open_bucket
    config = bytearray()
    with open_file(address, CONFIG) as pieces:
        for piece in _until(deadline, pieces):
            config += piece
            if len(config) > MAX_CONFIG_BYTES:
                raise InvalidAdapter(f"{CONFIG} takes over {MAX_CONFIG_BYTES} bytes", PARAM)
    with open_file(address, WEIGHTS) as pieces:
        for piece in _until(deadline, pieces):
            incoming.write(piece)
    incoming.seal(bytes(config), checksum)
    logger.info("fetched %s: %d bytes", address, incoming.num_bytes)


def _until(deadline: float, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield pieces; a host that sends a byte now and then must end, too."""
    for piece in pieces:
        if time.monotonic() > deadline:
            raise Unavailable(f"it has not come in {FETCH_SECONDS:g} s", PARAM, retry_after=60)
        yield piece
