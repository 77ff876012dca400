"""Whose K/V it is: the key that keeps base model, adapters and cache salts apart."""

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Namespace:
    """One radix tree's identity; `adapter` is there so that an unload finds all salts of it."""

    adapter: str
    key: bytes


def namespace(base_digest: str, adapter: str, cache_salt: str) -> Namespace:
    """Return the namespace of a request.

    Each part goes into the digest behind its own length, so no salt can spell an adapter.
    """
    digest = blake2b(b"topwork namespace 1", digest_size=32)
    for part in (base_digest, adapter, cache_salt):
        data = part.encode("utf-8", "surrogatepass")  # salts come from JSON: lone surrogates too
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return Namespace(adapter, digest.digest())
