"""Follows the certificate of the front door: changed files count within seconds, no stream is cut.

Owns the one file that HAProxy reads, and what broken files do: the certificate that was taken
before stays, and an error is logged until they can be used again.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

from deploy.certificate import combined, read_pem

logger = logging.getLogger("topwork.front_door")

INTERVAL = 1.0  # seconds between two looks; a change counts at the second look that sees it
# Looks until files that are of no use are judged again: one may only have come before its time.
LOOKS_BETWEEN = 30


def _now() -> datetime:
    return datetime.now(UTC)


class CertificateWatcher:
    """The two files of an operator, and the one that HAProxy has of them.

    Files are compared whole, as `FollowedFile` does and for its reasons. The two are seldom written
    at the same moment: between the two writes they do not match, which is no more than logged.
    """

    def __init__(
        self, cert: Path, key: Path, target: Path, clock: Callable[[], datetime] = _now
    ) -> None:
        """Take note of where the files are; nothing is read.

        Args:
            cert: the certificate, and those behind it.
            key: its private key.
            target: the file that HAProxy reads when it starts.
            clock: the time, with a zone.
        """
        self.target = target
        self._cert, self._key = cert, key
        self._clock = clock
        self._seen: tuple[bytes, bytes] | None = None  # at the last look
        self._taken: tuple[bytes, bytes] | None = None
        self._broken: tuple[bytes, bytes] | None = None  # found to be of no use
        self._looks_left = 0  # until it is judged again
        self._fault = ""  # that stands

    def prepare(self) -> str:
        """Write the file before HAProxy starts, and return it; of broken ones the last good stays.

        Raises:
            OSError, ValueError: if the files cannot be used, and none could before.
        """
        try:
            self._seen = read_pem(self._cert), read_pem(self._key)
            pem = combined(*self._seen, self._cert, self._key, self._clock())
        except (OSError, ValueError) as error:
            if not self.target.exists():
                raise
            self._failed(str(error))
            return self.target.read_text()
        self._taken = self._seen
        self._write(pem)
        return pem

    async def run(self, take: Callable[[str], Awaitable[None]]) -> None:
        """Look at intervals until cancelled; `take` gives HAProxy what has changed."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.look(take)

    async def look(self, take: Callable[[str], Awaitable[None]]) -> None:
        """Take in files that have changed, and have not since the last look."""
        try:
            files = await asyncio.to_thread(self._read)
        except (OSError, ValueError) as error:  # one is away, or too large
            self._failed(str(error))
            return
        has_settled, self._seen = files == self._seen, files
        self._looks_left -= 1
        if files == self._taken:
            self._mended()
        elif has_settled and (files != self._broken or self._looks_left <= 0):
            await self._take(files, take)

    async def _take(
        self, files: tuple[bytes, bytes], take: Callable[[str], Awaitable[None]]
    ) -> None:
        try:
            pem = await asyncio.to_thread(combined, *files, self._cert, self._key, self._clock())
            await take(pem)
        except (OSError, ValueError) as error:  # or HAProxy is not there, or refuses them
            self._broken, self._looks_left = files, LOOKS_BETWEEN
            self._failed(str(error))
            return
        self._write(pem)
        self._taken, self._broken, self._fault = files, None, ""
        logger.warning("The certificate was read anew from %s", self._cert)

    def _read(self) -> tuple[bytes, bytes]:
        return read_pem(self._cert), read_pem(self._key)

    def _write(self, pem: str) -> None:
        """Replace the file at once; nobody else may read it."""
        fresh = self.target.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(pem)
        fresh.replace(self.target)

    def _failed(self, fault: str) -> None:
        if fault != self._fault:
            logger.error("Certificate: %s; the one that was read before stays", fault)
        self._fault = fault

    def _mended(self) -> None:
        self._broken = None
        if self._fault:
            logger.warning("%s holds the certificate that counts again", self._cert)
        self._fault = ""
