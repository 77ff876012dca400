"""Where the suite runs: on a GPU, or dry, by Triton's interpreter on a CPU at toy sizes.

Owns what differs between the two. `prepare` comes before anything imports Triton, which decides at
its import whether it interprets.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """A device, and whether sizes are real."""

    device: torch.device
    is_dry: bool

    def pick(self, real: T, toy: T) -> T:
        """Return a size for this place."""
        return toy if self.is_dry else real

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Return normal numbers; each case starts from a seed of its own."""
        return torch.randn(shape, dtype=torch.float32, device=self.device).mul_(scale).to(dtype)

    def nans(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return memory that must not matter."""
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)

    def int32(self, values: object) -> Tensor:
        """Return host numbers on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def int64(self, values: object) -> Tensor:
        """Return host numbers on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def wait(self) -> None:
        """Return when the device has done all its work."""
        if not self.is_dry:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def not_waiting(self) -> Iterator[None]:
        """Let torch raise where the host would wait for the device; dry, it never does."""
        if self.is_dry:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def tidy(self) -> None:
        """Give back memory that nobody holds any more."""
        gc.collect()
        if not self.is_dry:
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, object]:
        """Return what a reader of the results wants to know of the machine."""
        import triton

        facts: dict[str, object] = {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": sys.version.split()[0],
            "is_dry": self.is_dry,
        }
        if not self.is_dry:
            properties = torch.cuda.get_device_properties(self.device)
            facts |= {
                "device": properties.name,
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "l2_bytes": properties.L2_cache_size,
                "cuda": torch.version.cuda,
            }
        return facts


def prepare(is_dry: bool) -> Place:
    """Return the place; call once in each process, first of all."""
    if not is_dry:
        assert torch.cuda.is_available(), "no GPU here; --dry-run needs none"
        return Place(torch.device("cuda", 0), is_dry=False)
    assert "triton" not in sys.modules, "Triton was imported before it was told to interpret"
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from tests.kernels.gpu import bf16

    bf16.install()
    return Place(torch.device("cpu"), is_dry=True)
