"""How one rank runs. Knows nothing of torch: those who start ranks read it without."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """How one rank runs; the same on all ranks of a group but for `rank` and `device`."""

    model_dir: str
    rank: int
    tp: int
    dtype: Literal["bfloat16", "float32"]
    device: str = "cpu"
    page_size: int = 64  # positions
    kv_memory_bytes: int
    kv_host_memory_bytes: int = 0  # for pages that the device has no room for; 0: none
    num_slots: int
    max_model_len: int  # positions that one sequence may have
    deterministic: bool = False  # on a GPU too, a row's bits do not depend on its batch
    num_threads: int | None  # compute threads of this process; None: torch's own choice
