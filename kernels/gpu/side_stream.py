"""A second stream of a GPU, for work of a step that can run beside other work of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Runs beside the current stream while a CUDA graph is captured, and in line with it else.

    In a graph the two meet without any host's time. Without one, events to make them meet would
    take the host longer than the device is kept from idling.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Put what is launched inside behind all that was launched before, beside what comes then.

        `join` must come before anything that needs it, and before its memory is given back.
        """
        stream = self._stream(device)
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield

    def join(self, device: torch.device) -> None:
        """Let what is launched next wait for what ran beside."""
        stream = self._stream(device)
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)

    def _stream(self, device: torch.device) -> "torch.cuda.Stream | None":
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
