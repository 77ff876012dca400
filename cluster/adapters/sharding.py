"""Cuts an adapter into what each tensor-parallel rank holds of it.

Column-parallel modules: A whole, B's rows cut. Row-parallel modules: A's columns cut, B whole.
Owns the layout of a shard's buffer; knows nothing of who asks or how shards travel.
"""

import numpy as np
import numpy.typing as npt

from cluster.adapters.adapter import ITEM_BYTES, Adapter, Bits
from worker.adapter_shard import AdapterShard, LoraEntry
from worker.partition import ROW_PARALLEL, Partition, partition

ALIGNMENT = 64  # bytes; every matrix starts on a cache line


def cut(adapter: Adapter, part: Partition) -> AdapterShard:
    """Return the slice of an adapter that the rank of `part` holds, in a buffer of its own."""
    entries: list[LoraEntry] = []
    matrices: list[tuple[int, Bits]] = []
    size = 0

    def place(matrix: Bits) -> tuple[int, tuple[int, int]]:
        nonlocal size
        offset = -(-size // ALIGNMENT) * ALIGNMENT
        size = offset + matrix.nbytes
        matrices.append((offset, matrix))
        return offset, (matrix.shape[0], matrix.shape[1])

    for module in adapter.modules:
        rows, columns = part.slices(module.module)
        if module.module in ROW_PARALLEL:
            a, b = module.a[:, columns.start : columns.stop], module.b
        else:
            a, b = module.a, module.b[rows.start : rows.stop]
        a_offset, a_shape = place(a)
        b_offset, b_shape = place(b)
        entries.append(
            LoraEntry(
                layer=module.layer,
                module=module.module,
                lora_rank=module.lora_rank,
                scaling=module.scaling,
                a_offset=a_offset,
                a_shape=a_shape,
                b_offset=b_offset,
                b_shape=b_shape,
            )
        )
    return AdapterShard(
        digest=adapter.digest,
        rank=part.rank,
        tp=part.tp,
        dtype=adapter.dtype,
        entries=tuple(entries),
        data=_packed(matrices, size, ITEM_BYTES[adapter.dtype]),
    )


def cut_all(adapter: Adapter, tp: int) -> tuple[AdapterShard, ...]:
    """Return the shards of all `tp` ranks, in rank order."""
    return tuple(cut(adapter, partition(adapter.model, tp, rank)) for rank in range(tp))


def _packed(matrices: list[tuple[int, Bits]], size: int, item_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a buffer of `size` bytes with each matrix, row-major, at its offset; gaps are zero."""
    data = np.zeros(size, np.uint8)
    for offset, matrix in matrices:
        place = data[offset : offset + matrix.nbytes].view(f"u{item_bytes}")
        place.reshape(matrix.shape)[...] = matrix
    return data
