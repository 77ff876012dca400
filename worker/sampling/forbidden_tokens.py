"""Which tokens cannot come next: all but the allowed ones, bad words, stop tokens that must wait.

A function of the parameters and of the output so far, computed on the host: company, chunks,
preemption and resumption change nothing of it. Knows nothing of logits but how many there are.
"""

from collections.abc import Sequence
from itertools import product

from worker.token_mask import Mask, allows, num_allowed


def completing(bad_words: Sequence[Sequence[int]], output: Sequence[int]) -> frozenset[int]:
    """Return the tokens with which the output would end in one of the bad words."""
    return frozenset(
        word[-1]
        for word in bad_words
        if len(word) == 1
        or (
            len(word) <= len(output) + 1
            and word[-2] == output[-1]  # of thousands of words hardly one goes further
            and tuple(output[1 - len(word) :]) == tuple(word[:-1])
        )
    )


def forbidden_tokens(
    allowed: Mask | None, bad: frozenset[int], held_back: Sequence[int], vocab_size: int
) -> list[int]:
    """Return which tokens are forbidden beside those that `allowed` is without, in order.

    Something must be left to draw: where nothing is, stop tokens need not wait any longer, and
    where that does not help, bad words may come.
    """
    if not (bad or held_back):
        return []
    for keeps_bad, keeps_held_back in product((True, False), repeat=2):
        tokens = (bad if keeps_bad else frozenset()).union(held_back if keeps_held_back else ())
        forbidden = sorted(token for token in tokens if token < vocab_size)
        left = vocab_size - len(forbidden) if allowed is None else _left(allowed, forbidden)
        if left:
            return forbidden
    return []


def _left(allowed: Mask, forbidden: Sequence[int]) -> int:
    """Return how many tokens are allowed and not forbidden."""
    return num_allowed(allowed) - sum(allows(allowed, token) for token in forbidden)
