"""Who holds a token: what a router asks for each call that brings one.

Owns what is remembered: a token that was good is so until its end, unless the issuer's keys or the
rules change. It is remembered by its SHA-256, as keys are.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cluster.errors import Unauthorized, Unavailable
from cluster.router.config import OidcConfig
from cluster.router.metrics.request_metrics import RouterMetrics
from cluster.router.tenancy.followed_file import FollowedFile
from cluster.router.tenancy.oidc.issuer_keys import IssuerKeys
from cluster.router.tenancy.oidc.rules import parse_rules, principal_of
from cluster.router.tenancy.oidc.verifier import (
    MAX_TOKEN,
    TokenVerifier,
    read_header,
    too_long,
)
from cluster.router.tenancy.principal import Principal

MAX_REMEMBERED = 10_000  # tokens


@dataclass(frozen=True, slots=True)
class _Known:
    principal: Principal
    expires: float  # seconds since 1970


class TokenRing:
    """The tokens of one issuer, as one router knows them; belongs to an event loop.

    `clock` gives seconds since 1970.
    """

    def __init__(
        self, config: OidcConfig, metrics: RouterMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        """Read the rules; keys come when `keys.run` does.

        Raises:
            OSError, ValueError: if the file of rules cannot be used.
        """
        self.issuer = config.issuer
        self.keys = IssuerKeys(config.issuer, config.jwks, metrics.key_set_failed)
        self.rules = FollowedFile(
            Path(config.rules_file), "rules for tokens", parse_rules, metrics.token_rules_failed
        )
        self._verifier = TokenVerifier(config.issuer, config.audiences, config.leeway)
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # the one used last is the last
        self.keys.note_changes(self._known.clear)
        self.rules.note_changes(lambda rules: self._known.clear())

    @property
    def num_remembered(self) -> int:
        """How many tokens are remembered."""
        return len(self._known)

    def identify(self, token: str) -> Principal:
        """Return who holds a token.

        Raises:
            Unauthorized: if it is not the issuer's, not for this server, or not of this time.
            Forbidden: if no rule gives its holder anything.
            Unavailable: if the issuer's keys were never had.
        """
        if len(token) > MAX_TOKEN:  # before it costs more
            raise too_long(token)
        now = self._clock()
        digest = sha256(token.encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(digest)
        if known is not None and not self._verifier.is_over(known.expires, now):
            self._known.move_to_end(digest)
            return known.principal
        self._known.pop(digest, None)
        if self.keys.current is None:
            read_header(token)
            raise Unavailable("the keys of the tokens' issuer are not known yet", retry_after=1)
        claims = self._verifier.verify(token, self.keys.current, now)
        principal = principal_of(self.rules.entries, claims, self.issuer)
        self._known[digest] = _Known(principal, claims.expires)
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return principal

    def lacks_key_of(self, token: str) -> bool:
        """Tell whether a token names a key that the issuer may have by now."""
        try:
            header = read_header(token)
        except Unauthorized:
            return False
        keys = self.keys.current
        return keys is None or keys.get(header.kid, header.alg) is None
