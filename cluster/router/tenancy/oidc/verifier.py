"""Tells whether a token is the issuer's, for us, and in its time.

Owns what of a token is looked at, and in which order: its length, its form, its header, the
signature, and only then what it says. Of the header `alg`, `kid` and `typ` count; keys in it, and
their addresses (`jwk`, `jku`, `x5c`, `x5u`), are never looked at. Knows no key but those it is
given.
"""

import re
from base64 import urlsafe_b64decode
from typing import Any

import msgspec
from jwt import PyJWS
from jwt.exceptions import PyJWTError

from cluster.errors import Unauthorized
from cluster.router.tenancy.oidc.key_set import ALGORITHMS, KeySet

MAX_TOKEN = 16_384  # characters
MAX_SUBJECT = 255  # as OpenID Connect has it
CODE = "invalid_token"  # RFC 6750's
_FORM = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+", re.ASCII)
_TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_JWS = PyJWS(algorithms=sorted(ALGORITHMS))


class Header(msgspec.Struct):
    """What counts of a token's header."""

    alg: str
    kid: str | None = None
    typ: str | None = None
    crit: Any = msgspec.UNSET
    b64: Any = msgspec.UNSET


class Claims(msgspec.Struct):
    """What a token that is good says."""

    subject: str
    expires: float  # seconds since 1970
    values: dict[str, Any]  # all claims


class _Registered(msgspec.Struct):
    iss: str
    sub: str
    aud: str | list[str]
    exp: int | float
    nbf: int | float = 0
    iat: int | float = 0


def has_form(token: str) -> bool:
    """Tell whether a text looks like a token, and not like a key, whatever it is worth."""
    return token.count(".") == 2


def refused(reason: str) -> Unauthorized:
    """Return the error of a token that is not taken."""
    return Unauthorized(f"this token is not taken: {reason}", code=CODE)


def too_long(token: str) -> Unauthorized:
    """Return the error of a token that is longer than any is read."""
    return refused(f"it has {len(token)} characters, and {MAX_TOKEN} are the most")


def read_header(token: str) -> Header:
    """Return the header of a token, which anyone can have written.

    Raises:
        Unauthorized: if it is not of the right form, or signed as no token may be.
    """
    if len(token) > MAX_TOKEN:
        raise too_long(token)
    if _FORM.fullmatch(token) is None:
        raise refused("it is no signed JSON Web Token")
    try:
        header = msgspec.json.decode(_decoded(token.partition(".")[0]), type=Header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise refused("its header cannot be read") from None
    if header.alg not in ALGORITHMS:
        raise refused("its algorithm is none that is allowed")
    if header.crit is not msgspec.UNSET or header.b64 is not msgspec.UNSET:
        raise refused("its header asks for extensions")
    if header.typ is not None and header.typ.lower() not in _TYPES:
        raise refused("it is of another type")
    return header


class TokenVerifier:
    """Checks tokens of one issuer; `leeway` is in seconds."""

    def __init__(self, issuer: str, audiences: tuple[str, ...], leeway: float) -> None:
        self._issuer = issuer
        self._audiences = frozenset(audiences)
        self._leeway = leeway

    def verify(self, token: str, keys: KeySet, now: float) -> Claims:
        """Return what a token says; `now` is in seconds since 1970.

        Raises:
            Unauthorized: with the reason, if it is not taken.
        """
        header = read_header(token)
        key = keys.get(header.kid, header.alg)
        if key is None:
            raise refused("it is signed with a key that the issuer does not have")
        try:
            payload = _JWS.decode(token, key.key, algorithms=[header.alg])
        except (PyJWTError, ValueError, TypeError, RecursionError):
            raise refused("its signature does not hold") from None
        return self._checked(payload, now)

    def is_over(self, expires: float, now: float) -> bool:
        """Tell whether the time of a token is over."""
        return now >= expires + self._leeway

    def _checked(self, payload: bytes, now: float) -> Claims:
        """Return what the issuer has signed, if it is for us and now."""
        try:
            values = msgspec.json.decode(payload, type=dict[str, Any])
            claims = msgspec.convert(values, _Registered)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise refused("it lacks iss, sub, aud or exp, or has them of a wrong type") from None
        if claims.iss != self._issuer:
            raise refused("it is another issuer's")
        audiences = [claims.aud] if isinstance(claims.aud, str) else claims.aud
        if not self._audiences & set(audiences):
            raise refused("it is for another audience")
        if self.is_over(claims.exp, now):
            raise refused("it has expired")
        if max(claims.nbf, claims.iat) > now + self._leeway:
            raise refused("its time has not come")
        if not 1 <= len(claims.sub) <= MAX_SUBJECT or not claims.sub.isprintable():
            raise refused(f"its subject is no text of 1 to {MAX_SUBJECT} printable characters")
        return Claims(claims.sub, float(claims.exp), values)


def _decoded(segment: str) -> bytes:
    """Return the bytes of a segment; raises ValueError."""
    return urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
