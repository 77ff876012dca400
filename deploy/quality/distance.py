"""How far one distribution of next tokens is from another, over many positions.

Shapes: R positions, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS_AT_ONCE = 16  # of float64


@dataclass(slots=True)
class Distance:
    """Kullback-Leibler divergence of what is served from the reference, and equal first choices.

    https://doi.org/10.1214/aoms/1177729694: the sum of p (log p - log q), in nats, p the
    reference's.
    """

    num_positions: int = 0
    total: float = 0.0
    largest: float = 0.0
    num_equal: int = 0

    @property
    def mean(self) -> float:
        """Of all positions."""
        return self.total / max(1, self.num_positions)

    @property
    def agreement(self) -> float:
        """Which part of the positions has the same most likely token, the first of equals."""
        return self.num_equal / max(1, self.num_positions)

    def add(self, served: Tensor, reference: Tensor) -> None:
        """Take in some positions.

        Args:
            served: logits [R, V] of what is served.
            reference: logits [R, V] of the reference.
        """
        assert served.shape == reference.shape, f"{served.shape} is not {reference.shape}"
        for first in range(0, len(served), _ROWS_AT_ONCE):
            some = slice(first, first + _ROWS_AT_ONCE)
            q, p = (torch.log_softmax(one[some].double(), 1) for one in (served, reference))
            found = (p.exp() * (p - q)).sum(1).clamp_min(0.0)  # below 0 by rounding alone
            self.total += float(found.sum())
            self.largest = max(self.largest, float(found.max()))
            self.num_equal += int((q.argmax(1) == p.argmax(1)).sum())
            self.num_positions += len(found)
