"""Named arrays that cross to a device together, in one copy.

A step has a dozen small arrays of indices; a copy of each costs more time than all their bytes.
Knows nothing of what is in them.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: what the widest load of a kernel asks for
_DTYPES = {torch.int32: np.int32, torch.int64: np.int64}


class DeviceArrays:
    """Arrays on the host, their twins on the device, and the way there."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        device: torch.device,
        pins_memory: bool,
    ) -> None:
        """Make all of them, filled with zeros on the host.

        Args:
            shapes: of each array by its name; int32 or int64.
            device: where the twins are.
            pins_memory: whether the device copies while the host goes on. The host must not write
                again before the copy is made.
        """
        starts, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            starts[name] = end
            size = prod(shape) * dtype.itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._staging = torch.zeros(end, dtype=torch.uint8, pin_memory=pins_memory)
        self._there = torch.empty(end, dtype=torch.uint8, device=device)
        whole = self._staging.numpy()
        self.host: dict[str, npt.NDArray[np.integer]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in shapes.items():
            start, stop = starts[name], starts[name] + prod(shape) * dtype.itemsize
            self.host[name] = whole[start:stop].view(_DTYPES[dtype]).reshape(shape)
            self.device[name] = self._there[start:stop].view(dtype).view(shape)

    def send(self) -> None:
        """Copy everything to the device, in the order of the work that waits there."""
        self._there.copy_(self._staging, non_blocking=True)
