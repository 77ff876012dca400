"""Which tokens may come, a bit for each: the first token has the lowest bit of the first byte.

So llguidance makes them, and of a large vocabulary an eighth of the memory is passed on.
"""

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint8]  # [ceil(V / 8)]; bits behind the last token are 0


def mask_of(bits: bytes, vocab_size: int) -> Mask:
    """Return what a bit for each token says; those beyond its end are 0."""
    packed = np.frombuffer(bits, dtype=np.uint8)
    size, rest = -(-vocab_size // 8), vocab_size % 8
    if len(packed) >= size and not rest:
        return packed[:size]
    mask = nothing(vocab_size)
    mask[: len(packed)] = packed[:size]
    if rest:
        mask[-1] &= (1 << rest) - 1
    return mask


def nothing(vocab_size: int) -> Mask:
    """Return a mask of no token."""
    return np.zeros(-(-vocab_size // 8), dtype=np.uint8)


def only(token_id: int, vocab_size: int) -> Mask:
    """Return a mask of a single token."""
    mask = nothing(vocab_size)
    mask[token_id >> 3] = 1 << (token_id & 7)
    return mask


def allows(mask: Mask, token_id: int) -> bool:
    """Return whether a token may come."""
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def num_allowed(mask: Mask) -> int:
    """Return how many tokens may come."""
    return int.from_bytes(mask.tobytes(), "little").bit_count()


def allowed_tokens(mask: Mask) -> npt.NDArray[np.int64]:
    """Return the tokens that may come, in order."""
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))
