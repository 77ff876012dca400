"""Which adapter is asked for next: by Zipf's law, or all in turn.

Owns the order alone, which is the same on every machine.
"""

from itertools import accumulate
from random import Random


def by_zipf(num_adapters: int, count: int, *, exponent: float, seed: str) -> tuple[int, ...]:
    """Return `count` draws of [0, num_adapters): number i has weight (i + 1) ** -exponent."""
    weights = accumulate((number + 1) ** -exponent for number in range(num_adapters))
    return tuple(Random(seed).choices(range(num_adapters), cum_weights=[*weights], k=count))


def in_turn(num_adapters: int, count: int, *, start: int) -> tuple[int, ...]:
    """Return `count` numbers of [0, num_adapters) one after the other, from `start` on."""
    return tuple((start + i) % num_adapters for i in range(count))
