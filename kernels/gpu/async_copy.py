"""Copies between the host and a GPU while neither waits for the other.

Both ways go from and to pinned memory, in the order of the device's other work: so a step can be
asked for while the one before it is computed. On tensors of a CPU, as tests hand them in, all is
done at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.interface import Numbers

_PIECE = 4 << 20  # bytes: a tenth of a millisecond
ALIGNMENT = 16  # bytes: what the widest load of a kernel asks for
_DTYPES = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32}


class DeviceEvent:
    """A point in the work that a device was given, for the host to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        """Stand behind all work that the device has been given."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Return when the work before the event is done; at once if it was never recorded."""
        if self._event is not None:
            self._event.synchronize()


class AsyncReadback:
    """See `kernels.interface.Readback`."""

    is_ready = False  # never polled: who asks for more work must not wait

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = [_copy_to_host(tensor) for tensor in tensors]
        self._event = DeviceEvent(device)
        self._event.record()

    def read(self) -> Sequence[Tensor]:
        """See `kernels.interface.Readback`."""
        self._event.synchronize()
        return self._tensors


def send_numbers(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host on the device.

    Their pinned copy stays until they are on the device: torch gives that memory away only then.
    """
    # Not made where it is pinned: of NumPy's arrays torch refuses that.
    host = torch.as_tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


def send_columns(columns: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Return columns of numbers on the device, sent in one copy as `send_numbers` sends one.

    Each begins at a multiple of 16 bytes: Triton compiles anew for one that is aligned otherwise.

    Args:
        columns: of int32, int64 or float32.
        device: where to.
    """
    starts = [0]
    for column in columns:
        starts.append(starts[-1] + -(-column.nbytes // ALIGNMENT) * ALIGNMENT)
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    spans = [
        slice(start, start + column.nbytes) for column, start in zip(columns, starts, strict=False)
    ]
    staging = host.numpy()
    for column, span in zip(columns, spans, strict=True):
        staging[span] = np.ascontiguousarray(column).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[span].view(_DTYPES[column.dtype.type])
        for column, span in zip(columns, spans, strict=True)
    ]


def send_in_pieces(host: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous tensor on the device, the caller waiting for each piece of it.

    A GPU makes the copies of all streams one after the other, as they become ready. What a step
    sends would wait for all of a large copy; so it waits for one piece at most.

    Args:
        host: pinned, unless there is no GPU.
        device: where to, on whose current stream no step may run.
    """
    there = torch.empty_like(host, device=device, pin_memory=False)
    sent = DeviceEvent(device)
    source, target = host.view(torch.uint8), there.view(torch.uint8)
    for start in range(0, source.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        target[piece].copy_(source[piece], non_blocking=True)
        sent.record()
        sent.synchronize()
    return there


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Return where on the host a tensor will be, once the device has come so far."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return target.copy_(tensor, non_blocking=True)
