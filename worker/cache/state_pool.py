"""The states of a rank's mixers, by page: one of a sequence that runs, others of checkpoints.

A page is one piece of memory with the states of all layers, so that it is copied in one go, within
a device and between it and the host. Nothing is ever cleared: the first chunk of a sequence does
not read its page, and all others find there what the one before has written.

Shapes: P pages.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from worker.mixers.config import Shape, state_size

if TYPE_CHECKING:
    from worker.protocol import PageCopy


class StatePool:
    """Pages on the device, and in host memory."""

    def __init__(
        self,
        num_layers: int,
        shapes: Sequence[Shape],
        num_pages: int,
        num_host_pages: int,
        device: torch.device,
        kernels: AnyKernels,
    ) -> None:
        """Make the pages, in each of them states of these shapes for each layer."""
        self._kernels = kernels
        sizes = [state_size(shape) for shape in shapes]
        size = num_layers * sum(sizes)
        self.pages = kernels.empty_pool((num_pages, size), torch.float32, device)
        self.layers: list[tuple[Tensor, ...]] = []
        start = 0
        for _ in range(num_layers):
            states = []
            for shape, aligned in zip(shapes, sizes, strict=True):
                own = self.pages[:, start : start + prod(shape)]
                states.append(own.view(num_pages, *shape))
                start += aligned
            self.layers.append(tuple(states))
        self.host_pages = torch.empty(
            (num_host_pages, size),
            dtype=torch.float32,
            device="cpu",
            pin_memory=kernels.pins_memory and num_host_pages > 0,
        )

    def copy(self, copies: Sequence["PageCopy"]) -> None:
        """Make copies one after the other; a fork is of all that a page has."""
        for one in copies:
            match one.kind:
                case "save":
                    self._kernels.save_states(self.pages[one.source], self.host_pages[one.target])
                case "restore":
                    self._kernels.restore_states(
                        self.host_pages[one.source], self.pages[one.target]
                    )
                case "fork":
                    self.pages[one.target].copy_(self.pages[one.source])
