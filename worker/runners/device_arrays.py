"""Named integer arrays that are copied to a device together, in one copy.

A step has a dozen small arrays of indices; a copy of each costs more time than all their bytes.
Owns when the host may write them again.
"""

from collections.abc import Mapping
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu.async_copy import ALIGNMENT, DeviceEvent

_DTYPES = {torch.int32: np.int32, torch.int64: np.int64}


class DeviceArrays:
    """Arrays on the host, their twins on the device, and the copy between them."""

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
            pins_memory: whether the device copies while the host goes on.
        """
        starts, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            starts[name] = end
            size = prod(shape) * dtype.itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._staging = torch.zeros(end, dtype=torch.uint8, pin_memory=pins_memory)
        self._on_device = torch.empty(end, dtype=torch.uint8, device=device)
        whole = self._staging.numpy()
        self._sent = DeviceEvent(device)
        self._host: dict[str, npt.NDArray[np.integer]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, shape) in shapes.items():
            start, stop = starts[name], starts[name] + prod(shape) * dtype.itemsize
            self._host[name] = whole[start:stop].view(_DTYPES[dtype]).reshape(shape)
            self.device[name] = self._on_device[start:stop].view(dtype).view(shape)

    def writable(self) -> Mapping[str, npt.NDArray[np.integer]]:
        """Return the arrays on the host, once the last copy of them is made.

        A step is started when the one before the last is done, and the copy of the last is the
        first thing that the device does for it: the wait is next to nothing.
        """
        self._sent.synchronize()
        return self._host

    def send(self) -> None:
        """Copy everything to the device, behind the work that is queued on it."""
        self._on_device.copy_(self._staging, non_blocking=True)
        self._sent.record()
