"""The API keys that are known, and whose key a caller presents.

Owns the look-up and the end of a key's time. The keys are replaced as a whole: a call that has been
let in goes on with the rights that it came with.
"""

import hmac
import time
from collections.abc import Callable, Iterable
from hashlib import sha256

from cluster.errors import Unauthorized
from cluster.router.tenancy.key_file import KnownKey
from cluster.router.tenancy.principal import Principal


class KeyRing:
    """The keys that are known; a ring of none refuses everybody.

    `clock` gives seconds since 1970.
    """

    def __init__(self, keys: Iterable[KnownKey], clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._keys: dict[bytes, KnownKey] = {}
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def knows(self, presented: str) -> bool:
        """Tell whether this is a key of the file, in its time or not."""
        return _digest(presented) in self._keys

    def replace(self, keys: Iterable[KnownKey]) -> None:
        """Know these keys from now on, and no others."""
        self._keys = {key.digest: key for key in keys}

    def identify(self, presented: str) -> Principal:
        """Return whose key this is, in a time that tells nothing of other keys.

        It is the SHA-256 that is looked up. Whoever guesses keys cannot choose how theirs begins,
        so that the time of a look-up brings nobody nearer to one.

        Raises:
            Unauthorized: if it is not known, or its time is over.
        """
        digest = _digest(presented)
        known = self._keys.get(digest)
        if known is None or not hmac.compare_digest(known.digest, digest):
            raise Unauthorized("unknown API key", code="invalid_api_key")
        if known.expires is not None and self._clock() >= known.expires:
            raise Unauthorized("this API key has expired", code="expired_api_key")
        return known.principal


def _digest(presented: str) -> bytes:
    return sha256(presented.strip().encode("utf-8", "surrogateescape")).digest()
