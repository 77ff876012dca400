"""The interface of collectives (all-reduce, gather), and the group of a single rank.

Owns the order of every sum: neighbours first, then pairs of them, in float32. So all ranks hold the
same bits, whatever the transport and the number of rows.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor


class Communicator(Protocol):
    """One rank of a group. Every rank must make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Return this rank's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, of the same shape, in float32, of int32 in int32.

        It may reuse `x`.

        The caller may change `x` as soon as it has the sum.

        A group of one returns `x` as it is.

        Raises:
            GroupBroken: if the other ranks do not take part.
        """
        ...

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return all ranks' `x` [S, widths[rank]] side by side on rank 0, None elsewhere.

        Raises:
            GroupBroken: if the other ranks do not take part.
        """
        ...

    def close(self) -> None:
        """Leave the group: ranks that wait for this one fail instead of waiting on."""
        ...


class SingleRank:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return `x`."""
        assert x.shape[1] == sum(widths), f"width {x.shape[1]} is not {sum(widths)}"
        return x

    def close(self) -> None:
        """Do nothing: no rank waits."""


class LeavingOnFailure:
    """Leaves the group when a rank's step fails: the other ranks must not wait for this one.

    A class, as every step is entered twice, and a generator's context takes several times as long.
    """

    def __init__(self, group: Communicator) -> None:
        self._group = group

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._group.close()


def summed_as(x: Tensor) -> Tensor:
    """Return a tensor as it is summed: integers as they are, all else in float32."""
    return x if x.dtype == torch.int32 else x.float()


def sum_in_pairs(parts: Sequence[Tensor]) -> Tensor:
    """Return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ... in float32, of int32 in int32.

    A binary tree, so that two ranks' sums can be branches of what one rank would have added up.
    The caller decides where to round.
    """
    if len(parts) == 1:
        return summed_as(parts[0])
    pairs = zip(parts[::2], parts[1::2], strict=False)
    sums = [_sum_of(left, right) for left, right in pairs]
    sums += parts[2 * len(sums) :]  # one without a neighbour, which is never a left one again
    while len(sums) > 1:
        for left, right in zip(sums[::2], sums[1::2], strict=False):
            left.add_(right)
        sums = sums[::2]
    return sums[0]


def _sum_of(left: Tensor, right: Tensor) -> Tensor:
    """Return a new tensor, and make no other beside it."""
    wide = summed_as(left)
    return wide + right if wide is left else wide.add_(right)
