"""A second stream of a GPU, for work of a step that can run beside other work of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.gpu.copy_stream import CopyStream


class SideStream(CopyStream):
    """Runs beside the current stream while a CUDA graph is captured, and in line with it else.

    In a graph the two meet without any host's time. Without one, events to make them meet would
    take the host longer than the device is kept from idling.
    """

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Put what is launched inside behind all that was launched before, beside what comes then.

        `lead_steps` must come before anything that needs it, and before its memory is given back.
        """
        self.follow_steps(device)
        with super().beside(device):
            yield

    def _stream(self, device: torch.device) -> "torch.cuda.Stream | None":
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return None
        return super()._stream(device)
