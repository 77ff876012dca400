"""Memory in pages of 2 MiB, for what every step reads or writes from end to end.

In pages of 4 KiB a core spends a third of its time on looking up where they are: streams of weights
were read at 25 GB/s, and at 38 in huge pages. A kernel that has none gives small pages.
"""

import ctypes
import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 * 1024 * 1024
_CHUNK = 8 * PAGE  # what is smaller shares one with others
_ALIGNMENT = 64  # bytes: a cache line
_POPULATE_WRITE = 23  # of madvise, from Linux 5.14 on; nothing that is there changes


class HugePages:
    """Hands out memory that is never given back piece by piece.

    Tensors of a chunk's size have one of their own, which goes when they go.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor that is not filled."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes >= _CHUNK:
            return huge_empty(num_bytes).view(dtype).view(shape)
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = huge_empty(_CHUNK), 0
        start = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[start : start + num_bytes].view(dtype).view(shape)


def huge_empty(num_bytes: int, *, is_exact: bool = False) -> Tensor:
    """Return [num_bytes] uint8 from the begin of a huge page on; it takes memory as it is used.

    Args:
        num_bytes: how many.
        is_exact: what does not fill a huge page takes small ones, and no more than it needs.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # huge pages of shared memory are another thing
    mapping = mmap.mmap(-1, num_bytes + PAGE, flags=flags)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE
    count = num_bytes // PAGE * PAGE if is_exact else len(whole) - first
    with suppress(OSError):  # no huge pages here: it is memory all the same
        if count > 0:
            mapping.madvise(mmap.MADV_HUGEPAGE, first, count)
    if num_bytes == 0:
        return whole[:0]
    # A storage of its own, which counts what was asked for; it holds the mapping, too.
    return torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=first)


def populate(memory: Tensor) -> threading.Thread:
    """Take the memory of a tensor of `huge_empty` now, in a thread of its own that is returned.

    At its first use it would be taken anyway, but then a step waits for it. Anybody may use it
    meanwhile. A kernel that cannot do it leaves it as it is.
    """
    thread = threading.Thread(target=_populate, args=(memory,), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(memory: Tensor) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    first, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    assert first % PAGE == 0, "a tensor of huge_empty starts a page"
    for start in range(first, end, _CHUNK):
        if madvise(start, min(_CHUNK, end - start), _POPULATE_WRITE) != 0:
            return
