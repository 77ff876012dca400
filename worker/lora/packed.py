"""The packed path of adapter loading: one copy to the device for the whole shard.

A shard of LoRAs of linear modules alone is laid out like `AdapterWeights` already. What is left is
to widen or narrow the whole buffer, to scale each B in place and to make views: a millisecond or
two beside the steps that run, where `worker.lora.builder` takes ten. That builds adapters with DoRA
or vocabulary, and sums.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from worker.errors import UnusableAdapter
from worker.lora.adapter_weights import AdapterWeights, LoraLayerWeights
from worker.lora.shard import FUSED_MODULES, AdapterShard, LoraEntry
from worker.lora.source import DTYPES
from worker.weights.partition import Partition


def packed_weights(
    shard: AdapterShard,
    part: Partition,
    *,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AdapterWeights:
    """Return the weights of a packed shard; all their tensors share one storage.

    Raises:
        UnusableAdapter: if a number is not finite in float32, times its scaling.
    """
    assert shard.is_packed, f"adapter {shard.digest} is not packed"
    data = _scaled(shard, dtype, device)
    indices: dict[tuple[tuple[int, ...], ...], Tensor] = {}  # layers mostly have the same one
    layers: list[list[LoraLayerWeights | None]] = [
        [None] * len(FUSED_MODULES) for _ in range(num_layers)
    ]
    by_linear = groupby(shard.entries, lambda entry: (entry.layer, _linear_of(entry.module)))
    item = DTYPES[shard.dtype].itemsize
    for (layer, linear), entries in by_linear:
        layers[layer][linear] = _fused(
            list(entries), FUSED_MODULES[linear], part, data, item, indices
        )
    return AdapterWeights(shard.digest, tuple(map(tuple, layers)), None, None)


def _scaled(shard: AdapterShard, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the shard's buffer on the device, every B times its scaling."""
    stored = DTYPES[shard.dtype]
    raw = torch.empty(len(shard.data) // stored.itemsize, dtype=stored)
    raw.view(torch.uint8).numpy()[:] = shard.data  # a copy: theirs is read-only
    data = raw.to(device, torch.promote_types(stored, dtype))
    all_b = data[shard.entries[0].b_offset // stored.itemsize :]
    scalings = {entry.scaling for entry in shard.entries}
    if len(scalings) == 1:
        all_b.mul_(shard.entries[0].scaling)
    else:
        for entry in shard.entries:
            first = entry.b_offset // stored.itemsize
            data[first : first + entry.b_shape[0] * entry.lora_rank].mul_(entry.scaling)
    if not bool(all_b.isfinite().all()):  # A came checked
        raise UnusableAdapter(
            f"adapter {shard.digest}: B times its scaling is over what {data.dtype} can hold"
        )
    return data.to(dtype)


def _fused(
    entries: Sequence[LoraEntry],
    modules: Sequence[str],
    part: Partition,
    data: Tensor,
    item: int,
    indices: dict[tuple[tuple[int, ...], ...], Tensor],
) -> LoraLayerWeights:
    """Return the LoRA of one fused linear: views of `data`, whose elements were `item` bytes."""
    first_a, first_b = entries[0].a_offset // item, entries[0].b_offset // item
    row_by_module, row = {}, 0
    for module in modules:
        row_by_module[module] = row
        row += len(part.slices(module)[0])
    blocks = []
    rank = end_b = 0
    for entry in entries:
        assert entry.a_offset // item == first_a + rank * entry.a_shape[1], "A's are not stacked"
        start, num_outputs = row_by_module[entry.module], entry.b_shape[0]
        first = entry.b_offset // item
        end_b = first + num_outputs * entry.lora_rank
        end = rank + entry.lora_rank
        blocks.append((rank, end, start, start + num_outputs, first - first_b))
        rank = end
    key = tuple(blocks)
    if key not in indices:
        indices[key] = torch.tensor(blocks)
    num_inputs = entries[0].a_shape[1]
    a = data[first_a : first_a + rank * num_inputs].view(rank, num_inputs)
    return LoraLayerWeights(a, data[first_b:end_b], indices[key], None, None)


def _linear_of(module: str) -> int:
    return next(index for index, fused in enumerate(FUSED_MODULES) if module in fused)
