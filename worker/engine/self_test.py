"""Whether products on this very machine give a row the same bits alone and in company.

Libraries choose their inner loops by the number of rows and by the CPU, so what was seen to hold on
one machine is looked at again on each. Knows nothing of what follows if it does not hold.
"""

import torch
from torch import Tensor

from kernels.dispatch import AnyKernels
from kernels.linear import LinearWeight
from worker.weights.model_weights import Weights

_COMPANY = (2, 3, 17, 64)  # rows


def unsteady_linears(weights: Weights, kernels: AnyKernels) -> tuple[str, ...]:
    """Return the names of the linears whose rows have other bits in company than alone."""
    layer = weights.layers[0]
    linears = {
        "qkv": layer.qkv,
        "o": layer.o,
        "gate_up": layer.gate_up,
        "down": layer.down,
        "lm_head": weights.lm_head,
    }
    device = weights.embedding.device
    with torch.inference_mode():
        return tuple(
            name for name, weight in linears.items() if not _is_steady(weight, kernels, device)
        )


def _is_steady(weight: LinearWeight, kernels: AnyKernels, device: torch.device) -> bool:
    x = _rows(max(_COMPANY), weight.in_features).to(device, weight.dtype)
    alone = [kernels.linear(x[row : row + 1], weight) for row in (0, 1)]
    return all(
        torch.equal(kernels.linear(x[:size], weight)[:2], torch.cat(alone)) for size in _COMPANY
    )


def _rows(num_rows: int, width: int) -> Tensor:
    """Return numbers [num_rows, width] float32 without a pattern that sums could hide behind."""
    return torch.arange(num_rows * width, dtype=torch.float32).square_().sin_().view(num_rows, -1)
