"""Linears whose inputs ranks share: their outputs are sums over the ranks, LoRA with them.

A product's part of a rank is summed as floats, in an order that depends on how many ranks there
are. In int8 the sums can be integers instead, with scales that all ranks share: then they do not
depend on it, where no adapter adds to them.

Shapes: T rows or pairs of rows and experts, K inputs of this rank, N outputs.
"""

from typing import Any

from torch import Tensor

from kernels.experts import ExpertsWeight, RoutedRows
from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from worker.distributed.communicator import Communicator


def row_parallel_linear(
    kernels: AnyKernels, x: Tensor, weight: LinearWeight, lora: Any | None, group: Communicator
) -> Tensor:
    """Return the sum over the ranks of x [T, K] @ weight transposed as [T, N], LoRA with it."""
    return summed(row_parallel_part(kernels, x, weight, lora, group), weight, lora, group)


def row_parallel_part(
    kernels: AnyKernels, x: Tensor, weight: LinearWeight, lora: Any | None, group: Communicator
) -> Tensor:
    """Return this rank's part [T, N] of that sum, which `summed` makes of all ranks'.

    The deltas are added to this rank's part of a sum, so one all-reduce serves both.
    """
    if weight.is_shared:
        y = shared_product(kernels, x, weight, group, is_summed_again=lora is not None)
    else:
        y = kernels.partial_linear(x, weight)
    if lora is not None:
        kernels.lora_apply(y, x, lora)
    return y


def summed(
    part: Tensor, weight: LinearWeight | ExpertsWeight, lora: Any | None, group: Communicator
) -> Tensor:
    """Return the sum over the ranks of their parts: of a weight that ranks share, parts are it.

    Unless LoRA was added to them, which `lora` says.
    """
    return part if weight.is_shared and lora is None else group.all_reduce(part)


def shared_product(
    kernels: AnyKernels,
    x: Tensor,
    weight: LinearWeight | ExpertsWeight,
    group: Communicator,
    routed: RoutedRows | None = None,
    *,
    is_summed_again: bool,
) -> Tensor:
    """Return the outputs [T, N] of a weight that ranks share, the same on all of them.

    If something is added that has to be summed over the ranks, they are zeros on all but the first.
    """
    linears = kernels.quantized
    assert linears is not None, "these kernels made the weight"
    largest = group.all_reduce(linears.row_largest(x, group.rank, group.size))
    sums = group.all_reduce(linears.quantized_sums(x, weight, largest, routed))
    is_zero = is_summed_again and group.rank > 0
    return linears.scale_sums(sums, weight, largest, routed, is_zero=is_zero)
