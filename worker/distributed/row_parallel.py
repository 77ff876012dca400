"""Linears whose inputs ranks share: their outputs are sums over the ranks, LoRA with them.

A product's part of a rank is summed as floats, in an order that depends on how many ranks there
are. In int8 the sums can be integers instead, with scales that all ranks share, and LoRA can be of
the inputs of all ranks, on each of them: then nothing depends on it.

Shapes: T rows or pairs of rows and experts, K inputs of this rank, N outputs.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernels.experts import ExpertsWeight, RoutedRows
from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from kernels.quantized import Piece
from worker.distributed.communicator import Communicator


def row_parallel_linear(
    kernels: AnyKernels, x: Tensor, weight: LinearWeight, lora: Any | None, group: Communicator
) -> Tensor:
    """Return the sum over the ranks of x [T, K] @ weight transposed as [T, N], LoRA with it."""
    return summed(row_parallel_part(kernels, x, weight, lora, group), weight, group)


def row_parallel_part(
    kernels: AnyKernels, x: Tensor, weight: LinearWeight, lora: Any | None, group: Communicator
) -> Tensor:
    """Return this rank's part [T, N] of that sum, which `summed` makes of all ranks'.

    The deltas are added to this rank's part of a sum, so one all-reduce serves both.
    """
    if weight.shared is None:
        return kernels.partial_linear(x, weight, lora)
    y = shared_product(kernels, x, weight, group)
    if lora is not None:
        kernels.lora_apply(y, all_inputs(kernels, x, weight, group), lora)
    return y


def summed(part: Tensor, weight: LinearWeight | ExpertsWeight, group: Communicator) -> Tensor:
    """Return the sum over the ranks of their parts: of a weight that ranks share, parts are it."""
    return group.all_reduce(part) if weight.shared is None else part


def all_inputs(
    kernels: AnyKernels,
    x: Tensor,
    weight: LinearWeight | ExpertsWeight,
    group: Communicator,
    name: str = "all inputs",
) -> Tensor:
    """Return all ranks' inputs of a weight that they share, of another x [T, K] as it is.

    What is added up over them does not depend on how many ranks there are.
    """
    if weight.shared is None:
        return x
    pieces = [Piece(0, x.shape[1], weight.shared.first)]
    return gathered(kernels, x, pieces, weight.shared.total, group, name)


def gathered(
    kernels: AnyKernels,
    x: Tensor,
    pieces: Sequence[Piece],
    width: int,
    group: Communicator,
    name: str,
) -> Tensor:
    """Return rows [T, width] of the pieces that all ranks have of them, of x [T, K] here.

    The arguments are those of `QuantizedLinears.spread`.
    """
    linears = kernels.quantized
    assert linears is not None, "only where sums are exact"
    words = group.all_reduce(linears.spread(x, pieces, width, name))
    return words.view(x.dtype)[:, :width]


def shared_product(
    kernels: AnyKernels,
    x: Tensor,
    weight: LinearWeight | ExpertsWeight,
    group: Communicator,
    routed: RoutedRows | None = None,
) -> Tensor:
    """Return the outputs [T, N] of a weight that ranks share, the same on all of them."""
    linears = kernels.quantized
    assert linears is not None, "these kernels made the weight"
    largest = group.all_reduce(linears.row_largest(x, weight, group.rank, group.size))
    sums = group.all_reduce(linears.quantized_sums(x, weight, largest, routed))
    return linears.scale_sums(sums, weight, largest, routed)
