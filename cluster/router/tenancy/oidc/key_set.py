"""The public keys that an issuer signs with, from its JSON Web Key Set.

Owns which algorithms there are: asymmetric ones alone, each for its own kind of key. A key that is
of another kind, for another use, private, or too large to be verified with at the door is none.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from jwt.exceptions import PyJWTError

MAX_BYTES = 1 << 20  # of a key set, or of a discovery document
MAX_KEYS = 100
_RSA = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_EC = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
_OKP = frozenset({"Ed25519", "Ed448"})
ALGORITHMS = _RSA | frozenset(_EC.values()) | {"EdDSA"}
RSA_BITS = range(2048, 8193)
MAX_EXPONENT = 1 << 32


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key, and what it may verify."""

    kid: str | None
    algorithms: frozenset[str]
    key: Any  # as PyJWT takes it


class KeySet:
    """The keys of an issuer at one time."""

    def __init__(self, keys: Iterable[VerificationKey]) -> None:
        self._by_kid: dict[tuple[str, str], VerificationKey] = {}
        self._by_algorithm: dict[str, list[VerificationKey]] = {}
        for key in keys:
            for algorithm in sorted(key.algorithms):
                self._by_algorithm.setdefault(algorithm, []).append(key)
                if key.kid is not None:
                    self._by_kid.setdefault((key.kid, algorithm), key)

    def get(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        """Return the key that a token names; one that names none must leave no choice."""
        if kid is not None:
            return self._by_kid.get((kid, algorithm))
        keys = self._by_algorithm.get(algorithm, [])
        return keys[0] if len(keys) == 1 else None


def parse_key_set(data: bytes) -> tuple[VerificationKey, ...]:
    """Return the keys of a key set that tokens can be signed with.

    Raises:
        ValueError: if it is no key set, or has no such key.
    """
    try:
        entries = msgspec.json.decode(data, type=_KeySet).keys
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ValueError("it is no JSON Web Key Set") from None
    if len(entries) > MAX_KEYS:
        raise ValueError(f"it has {len(entries)} keys, and {MAX_KEYS} are the most")
    keys = tuple(key for key in map(_verification_key, entries) if key is not None)
    if not keys:
        raise ValueError(f"none of its {len(entries)} keys is one to verify signatures with")
    return keys


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


def _verification_key(entry: dict[str, Any]) -> VerificationKey | None:
    """Return what an entry stands for, if it is for us."""
    operations, kid = entry.get("key_ops"), entry.get("kid")
    is_for_signatures = entry.get("use", "sig") == "sig" and (
        operations is None or (isinstance(operations, list) and "verify" in operations)
    )
    algorithms = _algorithms_of(entry)
    if "alg" in entry:
        algorithms = algorithms & frozenset(one for one in ALGORITHMS if one == entry["alg"])
    is_private = "d" in entry
    if is_private or not is_for_signatures or not algorithms or not isinstance(kid, str | None):
        return None
    key = _public_key(entry)
    return None if key is None else VerificationKey(kid, algorithms, key)


def _algorithms_of(entry: dict[str, Any]) -> frozenset[str]:
    """Return what this kind of key verifies."""
    kind, curve = entry.get("kty"), entry.get("crv")
    if kind == "RSA":
        return _RSA
    if kind == "EC" and isinstance(curve, str) and curve in _EC:
        return frozenset({_EC[curve]})
    if kind == "OKP" and isinstance(curve, str) and curve in _OKP:
        return frozenset({"EdDSA"})
    return frozenset()


def _public_key(entry: dict[str, Any]) -> Any:
    """Return the key as PyJWT takes it; None if it is no key, or too weak or too slow."""
    reader: Any = {"RSA": RSAAlgorithm, "EC": ECAlgorithm, "OKP": OKPAlgorithm}[entry["kty"]]
    try:
        key = reader.from_jwk(entry)
    except (PyJWTError, ValueError, TypeError, KeyError, AttributeError):
        return None  # PyJWT does not look at the types of members
    if isinstance(key, RSAPublicKey):
        is_usable = key.key_size in RSA_BITS and key.public_numbers().e < MAX_EXPONENT
        return key if is_usable else None
    return key
