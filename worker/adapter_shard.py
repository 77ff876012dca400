"""One rank's slice of one adapter, as it travels from the adapter pool to the rank.

A flat byte buffer with an index, so that Ray's object store can hand it over without copying.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class LoraEntry:
    """LoRA of one linear module in one layer: y += scaling * B (A x).

    A is [lora_rank, in], B is [out, lora_rank], both row-major in `AdapterShard.data` and already
    cut to the rank's slice: A's columns for row-parallel modules, B's rows for column-parallel.
    """

    layer: int
    module: str  # one of worker.partition.LINEAR_MODULES
    lora_rank: int
    scaling: float
    a_offset: int  # bytes
    a_shape: tuple[int, int]
    b_offset: int  # bytes
    b_shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdapterShard:
    """Everything one rank needs to serve one adapter."""

    digest: str  # SHA-256 of the whole adapter, hex
    rank: int
    tp: int
    dtype: Literal["bfloat16", "float16", "float32"]
    entries: tuple[LoraEntry, ...]  # ordered by (layer, position in LINEAR_MODULES)
    data: npt.NDArray[np.uint8]
