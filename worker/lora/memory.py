"""How much device memory an adapter will hold on a rank, from its shard before it is loaded.

Mirrors what `worker.lora.adapter_loader` makes, in bytes; the tests hold the two together. Free of
torch: the control plane imports it.
"""

from collections import defaultdict

from worker.linears import all_products
from worker.lora.shard import (
    EMBEDDING,
    HEAD,
    AdapterShard,
    LoraEntry,
    adapted_slices,
    num_outputs,
)
from worker.weights.partition import Partition

_LINE = 64  # bytes: where a block of B starts, and what a packed weight's inputs are padded to
_MAX_PACKED_OUTPUTS = 64  # that a packed weight's outputs may be padded to a multiple of
_GAIN_BYTES = 4  # of one output: DoRA's gains and shifts are float32
_CODE_BYTES, _SCALE_BYTES = 1, 4  # of an element in int8, and of a lora_rank's scale
# kernels.lora.CODED_INPUTS and CODED_RANKS, that codes of A and of B are padded to a multiple of.
_CODED_INPUTS, _CODED_RANKS = 4, 4
_SCORE_BYTES = 4  # of an element of a classification head: float32
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def claimed_bytes(
    shard: AdapterShard, part: Partition, device_item_bytes: int, model_item_bytes: int
) -> int:
    """Return the most bytes that an adapter will hold on the device of a rank.

    What it holds is the same but for the padding to lines of each adapted module, for tables that
    turn out to be the base model's, for the padding of a head of its own, and for DoRA's gains of
    exactly 1 and its shifts of modules without a bias; these are not known before. A sum holds no
    more than its parts would hold together.

    Args:
        shard: of the adapter, cut for the rank of `part`.
        part: what the rank holds.
        device_item_bytes: size of an element of the linears' A and B on the device; 1: they are
            codes, with a scale in float32 for each lora_rank.
        model_item_bytes: size of an element of the weights that are served.
    """
    num_elements = len(shard.data) // _ITEM_BYTES[shard.dtype]
    laid_out = _round_up(num_elements * device_item_bytes) if shard.is_packed else 0
    return max(laid_out, _built_bytes(shard, part, device_item_bytes, model_item_bytes))


def _built_bytes(
    shard: AdapterShard, part: Partition, device_item_bytes: int, model_item_bytes: int
) -> int:
    """Return the most bytes of weights that `adapter_loader` builds module by module."""
    entries = {(entry.layer, entry.module): entry for entry in shard.entries}
    products = _products(part)
    is_coded = device_item_bytes == _CODE_BYTES
    vocabulary_item_bytes = model_item_bytes if is_coded else device_item_bytes
    by_linear: dict[tuple[int, tuple[str, ...]], list[LoraEntry]] = defaultdict(list)
    for (layer, module), entry in entries.items():
        if module != EMBEDDING:
            by_linear[layer, products[module]].append(entry)
    total = 0
    for (_, modules), fused in by_linear.items():
        item_bytes = vocabulary_item_bytes if modules == (HEAD,) else device_item_bytes
        total += sum(_lora_bytes(part, entry, item_bytes) for entry in fused)
        if any(entry.magnitude_offset is not None for entry in fused):
            outputs = sum(num_outputs(part, module) for module in modules)
            has_bias = modules != (HEAD,)
            total += outputs * _GAIN_BYTES * (1 + has_bias)
    embedding = entries.get((0, EMBEDDING))
    if embedding is not None:
        total += _lora_bytes(part, embedding, vocabulary_item_bytes)
        total += part.hidden * _GAIN_BYTES * (embedding.magnitude_offset is not None)
    if shard.score is not None:
        total += shard.score.shape[0] * shard.score.shape[1] * _SCORE_BYTES
    return total + sum(_table_bytes(table.module, part, model_item_bytes) for table in shard.tables)


def _products(part: Partition) -> dict[str, tuple[str, ...]]:
    """Return, by module, the modules that are one product, it among them."""
    products = [tuple(one.name for one in modules) for modules in all_products(part.linears)]
    return {module: modules for modules in (*products, (HEAD,)) for module in modules}


def _lora_bytes(part: Partition, entry: LoraEntry, item_bytes: int) -> int:
    _, columns = adapted_slices(part, entry.module)
    a_bytes = entry.lora_rank * len(columns) * item_bytes
    ranks_of_b = entry.lora_rank
    if item_bytes == _CODE_BYTES:
        a_bytes = _round_up(entry.lora_rank * _round_up(len(columns), _CODED_INPUTS))
        a_bytes += _round_up(entry.lora_rank * _SCALE_BYTES)
        ranks_of_b = _round_up(entry.lora_rank, _CODED_RANKS)
    return a_bytes + _round_up(ranks_of_b * num_outputs(part, entry.module) * item_bytes)


def _table_bytes(module: str, part: Partition, item_bytes: int) -> int:
    if module == EMBEDDING:
        return len(part.vocab) * part.hidden * item_bytes
    # A head is packed, and padded, where that is faster.
    outputs = len(part.vocab) + _MAX_PACKED_OUTPUTS - 1
    return outputs * _round_up(part.hidden * item_bytes)


def _round_up(count: int, unit: int = _LINE) -> int:
    return -(-count // unit) * unit
