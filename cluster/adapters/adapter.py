"""An adapter as read and checked: its modules, its digest, and nothing of where it came from.

Numbers are kept as raw bits (uint16 or uint32), because numpy has no bfloat16 and nobody here
calculates with them. Knows nothing of files, names or tensor parallelism.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import numpy as np
import numpy.typing as npt

from worker.model_config import ModelConfig
from worker.partition import LINEAR_MODULES

Dtype = Literal["bfloat16", "float16", "float32"]
Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

ITEM_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
FORMAT = b"topwork adapter 1"


@dataclass(frozen=True, slots=True)
class LoraModule:
    """LoRA of one linear module in one layer: y += scaling * B (A x)."""

    layer: int
    module: str  # one of worker.partition.LINEAR_MODULES
    scaling: float
    a: Bits  # [lora_rank, in]
    b: Bits  # [out, lora_rank]

    @property
    def lora_rank(self) -> int:
        """The inner dimension of B A."""
        lora_rank: int = self.a.shape[0]
        return lora_rank


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter that fits `model`; equal digests mean equal answers."""

    digest: str  # SHA-256 as `adapter_digest` defines it, hex
    path: str  # where it was read; not part of what it is
    model: ModelConfig  # what its shapes were checked against
    dtype: Dtype  # of all its tensors
    modules: tuple[LoraModule, ...]  # ordered by (layer, position in LINEAR_MODULES)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(module.a.nbytes + module.b.nbytes for module in self.modules)

    @property
    def lora_rank(self) -> int:
        """The largest lora_rank of all modules."""
        return max(module.lora_rank for module in self.modules)

    @property
    def module_names(self) -> tuple[str, ...]:
        """The linear modules touched in any layer, in the order of LINEAR_MODULES."""
        touched = {module.module for module in self.modules}
        return tuple(name for name in LINEAR_MODULES if name in touched)


def adapter_digest(dtype: Dtype, modules: Iterable[LoraModule]) -> str:
    """Return the SHA-256, hex, of what an adapter computes.

    Every field is framed by its length, so that no two adapters can spell the same bytes. The
    scaling counts as its exact float64. `modules` must come in the order that Adapter keeps.
    """
    digest = sha256()

    def frame(field: bytes) -> None:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)

    frame(FORMAT)
    frame(dtype.encode())
    for module in modules:
        frame(struct.pack("<Qd", module.layer, module.scaling))
        frame(module.module.encode())
        for matrix in (module.a, module.b):
            frame(struct.pack("<QQ", *matrix.shape))
            frame(matrix.tobytes())
    return digest.hexdigest()
