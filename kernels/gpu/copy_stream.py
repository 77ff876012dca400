"""A stream of a GPU for copies between it and the host, beside the one that steps run on.

A copy on the stream of the steps would keep every kernel behind it waiting for the bus. On its own
stream it runs beside them, and the two wait for each other only where one needs the other.

torch gives memory back to the stream that it was taken on, so memory that another stream still uses
has to be marked (`Tensor.record_stream`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class CopyStream:
    """One such stream of each device; where there are none, all is in order without."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Queue on this stream what is queued inside; memory that is taken inside is its own."""
        stream = self._stream(device)
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            yield

    def follow_steps(self, device: torch.device) -> None:
        """Let what is queued here next wait for what steps have queued by now."""
        stream = self._stream(device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))

    def lead_steps(self, device: torch.device) -> None:
        """Let what steps queue next wait for what is queued here by now."""
        stream = self._stream(device)
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)

    def keep(self, tensor: Tensor) -> None:
        """Keep memory of the steps' stream until what is queued here by now is done with it."""
        stream = self._stream(tensor.device)
        if stream is not None:
            tensor.record_stream(stream)

    def lend(self, tensor: Tensor) -> None:
        """Keep memory of this stream until what steps have queued by now is done with it."""
        if self._stream(tensor.device) is not None:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def finish(self, device: torch.device) -> None:
        """Return when all that is queued here is done: the caller waits, steps do not."""
        stream = self._stream(device)
        if stream is not None:
            stream.synchronize()

    def _stream(self, device: torch.device) -> "torch.cuda.Stream | None":
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
