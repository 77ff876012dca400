"""What crosses between the host and a GPU while neither waits for the other.

Numbers go there and a few come back, from and to memory that stays in place, each in the order of
the device's other work: so a step can be asked for while the one before it is computed. On tensors
of a CPU, as tests hand them in, all is done at once. Knows nothing of what is crossing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.numbers import Numbers


class Mark:
    """A point in the work that a device was given, for the host to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Stand behind all work that the device has been given."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Return when the work before the mark is done; at once if it was never set."""
        if self._event is not None:
            self._event.synchronize()


class Landing:
    """See `kernels.dispatch.Fetched`."""

    is_here = False  # nobody looks: who asks for more work must not wait

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = [_landing(tensor) for tensor in tensors]
        self._mark = Mark(device)
        self._mark.set()

    def read(self) -> Sequence[Tensor]:
        """See `kernels.dispatch.Fetched`."""
        self._mark.wait()
        return self._tensors


def send_numbers(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host on the device.

    They lie in place until they are there: torch gives that memory to nobody else before.
    """
    here = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return here.to(device, non_blocking=True)


def _landing(tensor: Tensor) -> Tensor:
    """Return where on the host a tensor will be."""
    place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return place.copy_(tensor, non_blocking=True)
