"""The key set of an issuer, fetched in the background and kept while the issuer is away.

Owns when it is fetched: at intervals, and once for a key that is not known, at most once a minute.
All of it is bounded: time, bytes and the number of keys. Nothing is sent but a GET.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from cluster.router.tenancy.oidc.addresses import check_url
from cluster.router.tenancy.oidc.key_set import MAX_BYTES, KeySet, parse_key_set
from worker.regular_file import read_bounded

logger = logging.getLogger("topwork.router")

INTERVAL = 300.0  # seconds between two fetches
RETRY_INTERVAL = 10.0  # after one that has failed
SPACING = 60.0  # seconds between two fetches for keys that are not known
FETCH_SECONDS = 10.0  # that one may take in all
WAIT_SECONDS = 5.0  # that a call waits for it


class IssuerKeys:
    """The keys of one issuer; belongs to an event loop.

    Args:
        issuer: its URL.
        jwks: URL or file of its keys; None: as its discovery document says.
        on_failure: called for each fetch that has failed.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        issuer: str,
        jwks: str | None,
        on_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.current: KeySet | None = None  # None: they were never had
        self._issuer = issuer
        self._jwks = jwks
        self._on_failure = on_failure
        self._on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._taken = b""  # what the current ones were read from
        self._fault = ""  # that stands
        self._next_search = clock()
        self._fetching: asyncio.Task[None] | None = None

    def note_changes(self, on_change: Callable[[], None]) -> None:
        """Have `on_change` called when there are other keys than before."""
        self._on_change = on_change

    async def run(self) -> None:
        """Fetch at intervals until cancelled."""
        try:
            while True:
                await asyncio.shield(self._begin())
                await asyncio.sleep(RETRY_INTERVAL if self._fault else INTERVAL)
        finally:
            if self._fetching is not None:
                self._fetching.cancel()

    async def search(self) -> None:
        """Fetch because a key is not known, unless that was done within the last minute.

        Returns when it is over, or has taken longer than a call may wait.
        """
        if self._fetching is None:
            if self._clock() < self._next_search:
                return
            self._next_search = self._clock() + SPACING
        await asyncio.wait({self._begin()}, timeout=WAIT_SECONDS)

    def _begin(self) -> "asyncio.Task[None]":
        """Return the fetch that is under way, or a new one."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch())
            self._fetching.add_done_callback(self._end)
        return self._fetching

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._fetching = None

    async def _fetch(self) -> None:
        """Take in what the issuer says now, or note why that cannot be had."""
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                data = await self._read()
                if data != self._taken:
                    keys = await asyncio.to_thread(parse_key_set, data)
                    self.current, self._taken = KeySet(keys), data
                    self._on_change()
        except TimeoutError:
            self._failed(f"no answer within {FETCH_SECONDS:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            self._failed(str(error) or type(error).__name__)
        else:
            if self._fault:
                logger.warning("the keys of the issuer %s can be had again", self._issuer)
            self._fault = ""

    async def _read(self) -> bytes:
        """Return the bytes of the key set; raises what `_fetch` knows."""
        if self._jwks is not None and "://" not in self._jwks:
            return await asyncio.to_thread(read_bounded, Path(self._jwks), MAX_BYTES)
        context = await asyncio.to_thread(httpx.create_ssl_context)  # takes too long for the loop
        async with httpx.AsyncClient(
            verify=context, follow_redirects=False, timeout=FETCH_SECONDS
        ) as client:
            url = self._jwks or await self._discovered(client)
            return await _get(client, url)

    async def _discovered(self, client: httpx.AsyncClient) -> str:
        """Return where the issuer's discovery document says that its keys are."""
        url = self._issuer.rstrip("/") + "/.well-known/openid-configuration"
        try:
            found = msgspec.json.decode(await _get(client, url), type=_Discovery)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise ValueError(f"{url} is no discovery document with issuer and jwks_uri") from None
        if found.issuer != self._issuer:
            raise ValueError(f"{url} is of the issuer {found.issuer[:256]!r}")
        check_url(found.jwks_uri)
        return found.jwks_uri

    def _failed(self, fault: str) -> None:
        self._on_failure()
        fault = " ".join(fault.split())[:512]
        if fault != self._fault:
            kept = "those that were had before stay" if self.current else "there are none yet"
            logger.error("the keys of the issuer %s: %s; %s", self._issuer, fault, kept)
        self._fault = fault


class _Discovery(msgspec.Struct):
    issuer: str
    jwks_uri: str


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    """Return what a URL has, and no more of it than a key set may have.

    Raises:
        ValueError: if it is too much, or there is another status than 200.
        httpx.HTTPError: if it cannot be had.
    """
    data = bytearray()
    # Not compressed: a little of that could become very much.
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    async with client.stream("GET", url, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"{url} answers {response.status_code}")
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > MAX_BYTES:
                raise ValueError(f"{url} has more than {MAX_BYTES} bytes")
    return bytes(data)
